//! A running server.

use sdrun_tests::{lab::folder, machine::children};
use serde_json::Value;
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::{Child, Command, Stdio},
    thread,
};

/// A server on a free port. Dropping it kills it.
pub(crate) struct Server {
    pub(crate) child: Child,
    pub(crate) base: String,
}

impl Server {
    /// Starts one that draws with the built-in provider.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        let mut command = Command::new(folder("SDRUN_DIST").join("sdrun"));
        Self::of(command.args(["serve", "--port", "0", "-p", "ggml"]).args(arguments))
    }

    /// Starts a command, and waits until clients can connect.
    pub(crate) fn of(command: &mut Command) -> Self {
        let command = command.env("SDRUN_CONFIG", "").env_remove("SDRUN_API_KEY");
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut said = String::new();
        let base = loop {
            let Some(line) = lines.next() else { panic!("it did not start: {said}") };
            let line = line.unwrap();
            if let Some((_, base)) = line.split_once("ready: ") {
                break base.trim().to_string();
            }
            said = said + &line + "\n";
        };
        thread::spawn(move || lines.map_while(Result::ok).for_each(|line| eprintln!("server: {line}")));
        Server { child, base }
    }

    /// `127.0.0.1:7860`
    pub(crate) fn address(&self) -> &str {
        self.base.strip_prefix("http://").unwrap()
    }

    /// Sends a request, and returns the status, the head and the body of the reply. `headers` replace the usual ones.
    fn whole(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> (u16, String, Vec<u8>) {
        let mut stream = TcpStream::connect(self.address()).unwrap();
        let length = body.len().to_string();
        let mut head =
            format!("{method} {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {length}\r\n");
        if !headers.iter().any(|(name, _)| *name == "Host") {
            head += &format!("Host: {}\r\n", self.address());
        }
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        stream.write_all(format!("{head}\r\n").as_bytes()).unwrap();
        // A server that refuses a body may close before it has all of it.
        let _ = stream.write_all(body);
        let mut reply = Vec::new();
        let read = stream.read_to_end(&mut reply);
        let end = reply.windows(4).position(|window| window == b"\r\n\r\n");
        let end = end.unwrap_or_else(|| panic!("{method} {path}: no reply ({read:?})"));
        let head = String::from_utf8(reply[..end].to_vec()).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let body = reply.split_off(end + 4);
        let chunked = head.to_lowercase().contains("transfer-encoding: chunked");
        (status, head, if chunked { unchunked(&body) } else { body })
    }

    /// A request without a body: the status and the head of the reply.
    pub(crate) fn request(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> (u16, String) {
        let (status, head, _) = self.whole(method, path, headers, b"");
        (status, head)
    }

    /// Posts bytes and returns the status and what the reply says in JSON.
    pub(crate) fn send(&self, path: &str, body: &[u8]) -> (u16, Value) {
        let (status, _, body) = self.whole("POST", path, &[], body);
        (status, serde_json::from_slice(&body).unwrap_or_default())
    }

    pub(crate) fn post(&self, path: &str, body: Value) -> (u16, Value) {
        self.send(path, body.to_string().as_bytes())
    }

    pub(crate) fn get(&self, path: &str) -> (u16, Value) {
        let (status, _, body) = self.whole("GET", path, &[], b"");
        (status, serde_json::from_slice(&body).unwrap_or_default())
    }

    /// What is at an address.
    pub(crate) fn bytes(&self, path: &str) -> Vec<u8> {
        let (status, _, body) = self.whole("GET", path, &[], b"");
        assert_eq!(status, 200, "{path}: {}", String::from_utf8_lossy(&body));
        body
    }

    /// The reply as it comes.
    pub(crate) fn stream(&self, path: &str) -> BufReader<TcpStream> {
        let mut stream = TcpStream::connect(self.address()).unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nConnection: close\r\nHost: {}\r\n\r\n", self.address());
        stream.write_all(head.as_bytes()).unwrap();
        BufReader::new(stream)
    }

    /// The last state of a job.
    pub(crate) fn ended(&self, id: &str) -> Value {
        loop {
            let (status, job) = self.get(&format!("/api/jobs/{id}"));
            assert_eq!(status, 200, "{job}");
            if !["queued", "running"].contains(&job["state"].as_str().unwrap()) {
                return job;
            }
            thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    /// Orders pictures and waits for them.
    pub(crate) fn draws(&self, order: Value) -> Value {
        let (status, job) = self.post("/api/jobs", order);
        assert_eq!(status, 202, "{job}");
        let job = self.ended(job["id"].as_str().unwrap());
        assert_eq!(job["state"], "done", "{job}");
        job
    }

    /// Pixels of a picture in base64.
    pub(crate) fn picture(&self, text: &Value) -> Vec<u8> {
        use base64::{Engine, engine::general_purpose::STANDARD};
        pixels(&STANDARD.decode(text.as_str().unwrap()).unwrap())
    }

    /// Its child processes.
    pub(crate) fn children(&self) -> Vec<u32> {
        children(self.child.id())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A body without the marks between its chunks.
fn unchunked(mut body: &[u8]) -> Vec<u8> {
    let mut whole = Vec::new();
    while let Some(end) = body.windows(2).position(|window| window == b"\r\n") {
        let size = usize::from_str_radix(str::from_utf8(&body[..end]).unwrap().trim(), 16).unwrap();
        let start = end + 2;
        if size == 0 || start + size > body.len() {
            break;
        }
        whole.extend(&body[start..start + size]);
        body = &body[(start + size + 2).min(body.len())..];
    }
    whole
}

/// The pixels in a picture file.
pub(crate) fn pixels(file: &[u8]) -> Vec<u8> {
    image::load_from_memory(file).unwrap().to_rgb8().into_raw()
}

/// Bytes in base64.
pub(crate) fn base64(bytes: &[u8]) -> String {
    use base64::{Engine, engine::general_purpose::STANDARD};
    STANDARD.encode(bytes)
}
