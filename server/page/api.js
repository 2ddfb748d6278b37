// Talks to sdrun's HTTP API.

export class ApiError extends Error {
  constructor(status, { code, message, hint }) {
    super(message);
    this.status = status;
    this.code = code;
    this.hint = hint ?? null;
  }
}

export const unreachable = (error) => error.code === "unreachable";

async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new ApiError(0, { code: "unreachable", message: "The server does not answer.", hint: "Is sdrun still running?" });
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  const told = await response.json().then((body) => body.error, () => null);
  if (told?.message) return new ApiError(response.status, { code: "server", ...told });
  const message = response.status === 401
    ? "The server did not let this page in."
    : `The server answered with error ${response.status}.`;
  const hint = response.status === 401 ? "Open the page with the address that sdrun printed when it started." : null;
  return new ApiError(response.status, { code: "server", message, hint });
}

const getJson = async (path) => (await request(path)).json();
const postJson = async (path, body) => (await request(path, {
  method: "POST",
  headers: body === undefined ? {} : { "Content-Type": "application/json" },
  body: body === undefined ? undefined : JSON.stringify(body),
})).json();
const jobPath = (id) => `/api/jobs/${encodeURIComponent(id)}`;

export const getLibrary = () => getJson("/api/library");
export const refreshLibrary = () => postJson("/api/library/refresh");
export const getModel = (name) => getJson(`/api/models/${encodeURIComponent(name)}`);
export const getJobs = async () => (await getJson("/api/jobs")).jobs;
export const getJob = (id) => getJson(jobPath(id));
export const postOrder = (order) => postJson("/api/jobs", order);
export const cancelJob = (id) => postJson(`${jobPath(id)}/cancel`);
export const previewUrl = (id, number) => `${jobPath(id)}/preview?n=${number}`;
export const getBlob = async (url) => (await request(url)).blob();
export const readMetadata = async (blob) => (await request("/api/metadata", {
  method: "POST",
  headers: { "Content-Type": blob.type || "application/octet-stream" },
  body: blob,
})).json();

export const ended = (job) => ["done", "failed", "cancelled"].includes(job.state);

// Follows a job to its end. `onJob` gets each state; `onTrouble` gets errors
// while the server does not answer, and null once it does again. Events come
// first; when they break or stay silent, the page asks once a second instead.
export function watchJob(id, onJob, onTrouble) {
  let stopped = false;
  let timer = null;
  const source = new EventSource(`${jobPath(id)}/events`);

  const stop = () => {
    stopped = true;
    source.close();
    clearTimeout(timer);
  };
  const took = (job) => {
    if (ended(job)) stop();
    onJob(job);
  };
  const pollLater = (delay) => {
    clearTimeout(timer);
    timer = setTimeout(poll, delay);
  };
  let failures = 0;
  async function poll() {
    source.close();
    try {
      const job = await getJob(id);
      if (stopped) return;
      failures = 0;
      onTrouble(null);
      pollLater(1000);
      took(job);
    } catch (error) {
      if (stopped) return;
      failures += 1;
      // Without the job or the right to see it, asking again cannot help.
      const hopeless = [401, 403, 404].includes(error.status);
      if (hopeless) stop();
      else pollLater(Math.min(10000, 1000 * failures));
      onTrouble(error, hopeless);
    }
  }

  source.addEventListener("job", (event) => {
    if (stopped) return;
    pollLater(15000);
    took(JSON.parse(event.data));
  });
  source.onerror = () => {
    if (!stopped) pollLater(300);
    source.close();
  };
  pollLater(15000);
  return stop;
}
