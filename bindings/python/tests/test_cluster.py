"""Two replicas on a local Ray cluster, one of which is killed while it draws. Needs `ray[serve]`, `aiohttp` and SDRUN_CLI."""

import base64
import io
import json
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import ray
from PIL import Image

PORT = 18472


@pytest.fixture(scope="module")
def cluster():
    from ray import serve

    import sdrun.cluster

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    arguments = {"program": os.environ["SDRUN_CLI"], "options": "--provider ggml --threads 1", "gpus": "0", "cpus": "0.5", "least": "2"}
    serve.run(sdrun.cluster.app(arguments))
    yield
    serve.shutdown()
    ray.shutdown()


def ask(path, order=None):
    body = None if order is None else json.dumps(order).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/{path}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        body = answer.read()
        return json.loads(body) if answer.headers["content-type"].startswith("application/json") else body


def job(**order):
    return ask("api/jobs", {"prompt": "a red circle left of a blue square", "steps": 4, "seed": 7, **order})["id"]


def ended(number):
    """The job's last state, from its events."""
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/api/jobs/{number}/events", timeout=300) as events:
        states = [json.loads(line[5:]) for line in events if line.startswith(b"data:")]
    assert all(state["id"] == number for state in states)
    assert [state["state"] in ("done", "failed", "cancelled") for state in states].count(True) == 1
    return states[-1]


def pixels(picture):
    """A picture of a job, without its texts: those say which networks were loaded for it."""
    return Image.open(io.BytesIO(ask(picture["url"].lstrip("/")))).tobytes()


def servers():
    """Process numbers of the servers, with the processor time that each has used."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            if b"serve" in command and b"--parent-pid" in command:
                times = (folder / "stat").read_text().rpartition(")")[2].split()
                found[int(folder.name)] = int(times[11]) + int(times[12])
        except OSError:
            pass
    return found


def busiest():
    """The server that draws now."""
    before = servers()
    time.sleep(0.5)
    after = servers()
    return max((after[number] - before.get(number, 0), number) for number in after)[1]


def wait_for(what, seconds=120):
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, what
        time.sleep(0.2)
    return found


def test_it_has_the_api_of_one_server(cluster):
    assert len(servers()) == 2
    assert ask("api/library")["models"]
    pictures = ask("sdapi/v1/txt2img", {"prompt": "a red circle", "steps": 2, "seed": 5})["images"]
    assert base64.b64decode(pictures[0]).startswith(b"\x89PNG")
    assert ask("v1/images/generations", {"prompt": "a red circle", "size": "64x64", "seed": 5})["data"]
    with pytest.raises(urllib.error.HTTPError) as error:
        job(model="nothing")
    assert error.value.code == 404 and "nothing" in json.loads(error.value.read())["error"]["message"]
    with pytest.raises(urllib.error.HTTPError) as error:
        ask("api/jobs/0123456789abcdef")
    assert error.value.code == 404


def test_a_job_draws_the_picture_of_its_seed_wherever_it_runs(cluster):
    jobs = [job() for _ in range(4)]
    states = [ended(number) for number in jobs]
    assert {state["state"] for state in states} == {"done"}
    assert len({pixels(state["pictures"][0]) for state in states}) == 1
    assert [state["id"] for state in ask("api/jobs")["jobs"][:4]] == jobs[::-1]


def test_a_model_stays_with_the_worker_that_holds_it(cluster):
    prompt = "a red circle <lora:outline:1>"
    ended(job(prompt=prompt))
    # Serve tells its router a little later.
    time.sleep(5)
    for seed in range(4):
        networks = ended(job(prompt=prompt, seed=seed))["networks"]
        assert {network["origin"] for network in networks} == {"kept"}, networks


def test_a_job_is_cancelled(cluster):
    number = job(steps=200, count=50)
    wait_for(lambda: ask(f"api/jobs/{number}")["done"] > 0)
    ask(f"api/jobs/{number}/cancel", {})
    assert ended(number)["state"] == "cancelled"


def test_settings_reach_every_worker(cluster):
    ask("sdapi/v1/options", {"samples_format": "jpg"})
    for _ in range(4):
        picture = ask("sdapi/v1/txt2img", {"prompt": "x", "steps": 1, "seed": 1})["images"][0]
        assert base64.b64decode(picture).startswith(b"\xff\xd8")
    ask("sdapi/v1/options", {"samples_format": "png"})


@pytest.mark.parametrize("victim", ["server", "replica"])
def test_a_lost_worker_loses_no_job(cluster, victim):
    options = {"prompt": "three green stars", "steps": 150, "count": 4, "seed": 11}
    expected = [pixels(picture) for picture in ended(job(**options))["pictures"]]
    wait_for(lambda: len(servers()) == 2)
    number = job(**options)
    wait_for(lambda: ask(f"api/jobs/{number}")["done"] > 100)
    server = busiest()
    parent = int(Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(server if victim == "server" else parent, signal.SIGKILL)
    state = ended(number)
    assert state["state"] == "done" and server not in servers()
    assert [pixels(picture) for picture in state["pictures"]] == expected
    # Ray replaces the worker, and everything works again.
    wait_for(lambda: len(servers()) == 2)
    assert ended(job())["state"] == "done"
