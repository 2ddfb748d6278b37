//! `sdrun serve` as its clients see it: the same pictures as on the command line, many clients at once, and everything that can go wrong.

#![cfg(unix)]
#![allow(clippy::unwrap_used)]

#[path = "serve/machine.rs"]
mod machine;

use machine::{Server, pixels};
use sdrun_tests::lab::folder;
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, Write},
    net::TcpStream,
    path::Path,
    process::Command,
    sync::Mutex,
    thread,
};

const PROMPT: &str = "a red circle left of a blue square";

/// Pixels of what the command line draws.
fn drawn(dir: &Path, arguments: &[&str]) -> Vec<u8> {
    let mut command = Command::new(folder("SDRUN_DIST").join("sdrun"));
    command.args(["generate", PROMPT, "-q", "-p", "ggml", "-s", "7", "-o", "picture.png"]);
    let done = command.args(arguments).current_dir(dir).env("SDRUN_CONFIG", "").output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    pixels(&fs::read(dir.join("picture.png")).unwrap())
}

/// All three APIs draw what the command line draws from the same seed.
#[test]
fn pictures_are_those_of_the_command_line() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(&[]);
    let plain = drawn(dir.path(), &[]);
    let job = server.draws(json!({ "prompt": PROMPT, "seed": 7 }));
    let file = server.bytes(job["pictures"][0]["url"].as_str().unwrap());
    assert_eq!(pixels(&file), plain);
    // The metadata tell how to draw it again.
    let (status, told) = server.send("/api/metadata", &file);
    assert_eq!((status, &told["model_found"], &told["unread"]), (200, &json!(true), &json!([])));
    let again = server.draws(told["order"].clone());
    assert_eq!(pixels(&server.bytes(again["pictures"][0]["url"].as_str().unwrap())), plain);

    let (_, reply) = server.post("/v1/images/generations", json!({ "prompt": PROMPT, "seed": 7 }));
    assert_eq!(server.picture(&reply["data"][0]["b64_json"]), plain);
    let by_url =
        json!({ "prompt": PROMPT, "seed": 7, "response_format": "url", "size": "auto", "model": "dall-e-2" });
    let (_, reply) = server.post("/v1/images/generations", by_url);
    let url = reply["data"][0]["url"].as_str().unwrap().strip_prefix(&server.base).unwrap();
    assert_eq!(pixels(&server.bytes(url)), plain);

    // A1111's clients get A1111's noise and rounding.
    let a1111 = drawn(dir.path(), &["--seed-like", "a1111", "--rng", "nv"]);
    assert_ne!(a1111, plain);
    let (_, reply) = server.post("/sdapi/v1/txt2img", json!({ "prompt": PROMPT, "seed": 7 }));
    assert_eq!(server.picture(&reply["images"][0]), a1111);
    let info: Value = serde_json::from_str(reply["info"].as_str().unwrap()).unwrap();
    assert_eq!(info["all_seeds"], json!([7]));
    let (_, told) = server.post("/sdapi/v1/png-info", json!({ "image": reply["images"][0] }));
    assert_eq!((&told["info"], &told["parameters"]["Seed"]), (&info["infotexts"][0], &json!("7")));
}

/// Networks stay loaded, and another LoRA is a refit. Several sizes do not evict each other.
#[test]
fn another_lora_is_a_refit() {
    let server = Server::start(&[]);
    let origins = |order: Value| -> BTreeMap<String, String> {
        let job = server.draws(order);
        let networks = job["networks"].as_array().unwrap().iter();
        networks
            .map(|network| {
                let text = |key: &str| network[key].as_str().unwrap().to_string();
                (text("part"), text("origin"))
            })
            .collect()
    };
    origins(json!({ "prompt": PROMPT, "seed": 1 }));
    let same = origins(json!({ "prompt": "a green star", "seed": 2 }));
    assert!(same.values().all(|origin| origin == "kept"), "{same:?}");
    let lora = origins(json!({ "prompt": PROMPT, "seed": 1, "loras": [{ "name": "outline" }] }));
    assert_eq!(lora["unet"], "refitted", "{lora:?}");
    let back = origins(json!({ "prompt": PROMPT, "seed": 1 }));
    assert_eq!(back["unet"], "refitted", "{back:?}");
    // Unloaded networks come from the cache again.
    assert_eq!(server.post("/sdapi/v1/unload-checkpoint", json!({})), (200, json!({})));
    let loaded = origins(json!({ "prompt": PROMPT, "seed": 1 }));
    assert_eq!(loaded["unet"], "cached", "{loaded:?}");
    let numbers = String::from_utf8(server.bytes("/metrics")).unwrap();
    let number = |name: &str| -> f64 {
        let line = numbers.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().parse().unwrap()
    };
    assert!(number("sdrun_networks_total{origin=\"refitted\"}") >= 2.0, "{numbers}");
    assert_eq!((number("sdrun_jobs_total{state=\"done\"}"), number("sdrun_jobs_running")), (6.0, 0.0));
    assert!(number("sdrun_steps_per_second") > 0.0 && number("sdrun_resident_bytes") > 1e6);
}

/// Eight clients order pictures of different sizes, with and without a LoRA, and cancel some. Each picture is the one that its order gives
/// alone.
#[test]
fn clients_do_not_disturb_each_other() {
    let server = Server::start(&[]);
    let orders: Vec<Value> = (0..12)
        .map(|n| {
            let loras = if n % 3 == 0 { json!([{ "name": "outline", "strength": 0.8 }]) } else { json!([]) };
            let side = [64, 48, 80][n % 3];
            json!({ "prompt": PROMPT, "seed": n, "steps": 3, "width": side, "height": 64, "loras": loras })
        })
        .collect();
    let of = |order: &Value| {
        let job = server.draws(order.clone());
        pixels(&server.bytes(job["pictures"][0]["url"].as_str().unwrap()))
    };
    let alone: Vec<Vec<u8>> = orders.iter().map(of).collect();
    let cancelled = Mutex::new(0);
    thread::scope(|scope| {
        for client in 0..8 {
            let (server, orders, alone, cancelled) = (&server, &orders, &alone, &cancelled);
            scope.spawn(move || {
                for round in 0..6 {
                    let which = (client * 5 + round * 7) % orders.len();
                    if (client + round) % 5 == 0 {
                        let long = json!({ "prompt": PROMPT, "steps": 200, "count": 64 });
                        let (_, job) = server.post("/api/jobs", long);
                        let id = job["id"].as_str().unwrap();
                        server.post(&format!("/api/jobs/{id}/cancel"), json!(null));
                        assert_eq!(server.ended(id)["state"], "cancelled");
                        *cancelled.lock().unwrap() += 1;
                    } else {
                        let job = server.draws(orders[which].clone());
                        let found = pixels(&server.bytes(job["pictures"][0]["url"].as_str().unwrap()));
                        assert!(found == alone[which], "client {client}, order {which}");
                    }
                }
            });
        }
    });
    assert!(*cancelled.lock().unwrap() > 5);
}

/// Progress arrives as events, previews are pictures, and a cancelled job keeps what is done.
#[test]
fn progress_comes_as_events_and_jobs_can_be_cancelled() {
    let server = Server::start(&[]);
    let (status, job) = server.post("/api/jobs", json!({ "prompt": PROMPT, "count": 64, "steps": 20 }));
    assert_eq!(status, 202);
    let id = job["id"].as_str().unwrap();
    let waiting = server.post("/api/jobs", json!({ "prompt": PROMPT, "steps": 200, "count": 64 })).1;
    let (waiting, place) = (waiting["id"].as_str().unwrap(), waiting["position"].as_u64());
    assert_eq!(place, Some(1));
    // A waiting job ends at once.
    let (_, stopped) = server.post(&format!("/api/jobs/{waiting}/cancel"), json!(null));
    assert_eq!(stopped["state"], "cancelled");

    let mut stream = server.stream(&format!("/api/jobs/{id}/events"));
    let mut states = Vec::new();
    let mut line = String::new();
    while stream.read_line(&mut line).unwrap() > 0 {
        if let Some(data) = line.strip_prefix("data:") {
            let job: Value = serde_json::from_str(data).unwrap();
            let done = job["pictures"].as_array().unwrap().len();
            if done == 2 && states.last().is_none_or(|state| state != "stopping") {
                assert!(job["preview"].as_u64().unwrap() > 0 && job["total"] == 64 * 20);
                let preview = server.bytes(&format!("/api/jobs/{id}/preview"));
                assert_eq!(pixels(&preview).len(), 3 * 64 * 64);
                server.post(&format!("/api/jobs/{id}/cancel"), json!(null));
                states.push("stopping".to_string());
            }
            if job["state"] != "running" {
                states.push(job["state"].as_str().unwrap().into());
            }
        }
        line.clear();
    }
    assert_eq!(states.last().unwrap(), "cancelled", "the stream ends with the job");
    let pictures = server.ended(id)["pictures"].as_array().unwrap().len();
    assert!((2..64).contains(&pictures), "{pictures}");
    server.bytes(&format!("/api/jobs/{id}/pictures/1"));
    let (_, all) = server.get("/api/jobs");
    assert_eq!(all["jobs"].as_array().unwrap().len(), 2);
    // What was loaded stays loaded.
    let next = server.draws(json!({ "prompt": PROMPT, "steps": 1 }));
    let networks = next["networks"].as_array().unwrap();
    assert!(networks.iter().all(|network| network["origin"] == "kept"), "{networks:?}");
}

/// A client that goes away needs no picture.
#[test]
fn a_client_that_goes_away_cancels_its_job() {
    let server = Server::start(&[]);
    let connect = |name: &str| {
        let order = json!({ "prompt": PROMPT, "steps": 200, "batch_size": 64, "force_task_id": name });
        let body = order.to_string();
        let mut client = TcpStream::connect(server.address()).unwrap();
        let head = format!(
            "POST /sdapi/v1/txt2img HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        client.write_all(format!("{head}{body}").as_bytes()).unwrap();
        client
    };
    let client = connect("mine");
    let progress =
        |id: &str| server.post("/v1/internal/progress", json!({ "id_task": id, "live_preview": true }));
    while progress("mine").1["active"] != true {
        thread::yield_now();
    }
    // One that waits leaves its place at once.
    let second = connect("second");
    let waiting = || String::from_utf8(server.bytes("/metrics")).unwrap().contains("jobs_waiting 1\n");
    while !waiting() {
        thread::yield_now();
    }
    drop(second);
    while waiting() {
        thread::yield_now();
    }
    assert_eq!(progress("mine").1["active"], true);
    drop(client);
    while progress("mine").1["completed"] != true {
        thread::yield_now();
    }
    assert_eq!(progress("another").0, 404);
    server.draws(json!({ "prompt": PROMPT, "steps": 1 }));
}

/// A1111's progress, interrupt and skip. An interrupted client gets what is done.
#[test]
fn drawing_can_be_interrupted_and_skipped() {
    let server = Server::start(&[]);
    let order = json!({ "prompt": PROMPT, "steps": 20, "batch_size": 64, "seed": 7 });
    let idle = server.get("/sdapi/v1/progress").1;
    assert_eq!((&idle["progress"], &idle["state"]["job_count"]), (&json!(0.0), &json!(0)));
    thread::scope(|scope| {
        let client = scope.spawn(|| server.post("/sdapi/v1/txt2img", order).1);
        let until = |count: u64| loop {
            let now = server.get("/sdapi/v1/progress").1;
            if now["state"]["job_no"].as_u64().unwrap() >= count {
                return now;
            }
        };
        let now = until(1);
        assert!(now["progress"].as_f64().unwrap() >= 0.01 && now["state"]["job_count"].as_u64().unwrap() > 0);
        assert!(server.picture(&now["current_image"]).len() == 3 * 64 * 64);
        server.post("/sdapi/v1/skip", json!({}));
        until(4);
        assert_eq!(server.post("/sdapi/v1/interrupt", json!(null)).0, 200);
        let reply = client.join().unwrap();
        let info: Value = serde_json::from_str(reply["info"].as_str().unwrap()).unwrap();
        let seeds: Vec<u64> =
            info["all_seeds"].as_array().unwrap().iter().map(|s| s.as_u64().unwrap()).collect();
        assert_eq!(reply["images"].as_array().unwrap().len(), seeds.len());
        assert!(seeds.len() >= 4 && seeds.len() < 63, "{seeds:?}");
        let gaps = seeds.windows(2).filter(|pair| pair[1] - pair[0] == 2).count();
        assert_eq!((seeds[0], gaps), (7, 1), "one picture was left out: {seeds:?}");
    });
}

/// When the process of a provider dies, its job fails and the next one is drawn.
#[test]
fn a_dead_worker_costs_one_job() {
    let server = Server::start(&["--isolate"]);
    server.draws(json!({ "prompt": PROMPT, "steps": 1 }));
    let (_, job) = server.post("/api/jobs", json!({ "prompt": PROMPT, "steps": 200, "count": 64 }));
    let id = job["id"].as_str().unwrap();
    while server.get(&format!("/api/jobs/{id}")).1["done"] == 0 {}
    let workers = server.children();
    assert!(!workers.is_empty());
    for worker in workers {
        Command::new("kill").args(["-9", &worker.to_string()]).status().unwrap();
    }
    let failed = server.ended(id);
    assert_eq!(failed["state"], "failed", "{failed}");
    assert_eq!(failed["error"]["code"], "provider_gone", "{failed}");
    server.draws(json!({ "prompt": PROMPT, "steps": 1 }));
}

#[test]
fn a_full_queue_says_so() {
    let server = Server::start(&[]);
    let order = json!({ "prompt": PROMPT, "steps": 200, "count": 64 });
    let sent: Vec<(u16, Value)> = (0..40).map(|_| server.post("/api/jobs", order.clone())).collect();
    let (status, last) = sent.last().unwrap();
    assert_eq!((*status, &last["error"]["code"]), (429, &json!("queue_full")), "{last}");
    assert!(sent.iter().filter(|(status, _)| *status == 202).count() >= 32);
    // A full queue does not block the rest.
    assert_eq!(server.get("/sdapi/v1/options").0, 200);
    for (_, job) in &sent {
        if let Some(id) = job["id"].as_str() {
            server.post(&format!("/api/jobs/{id}/cancel"), json!(null));
        }
    }
    server.draws(json!({ "prompt": PROMPT, "steps": 1 }));
}

/// Bad input is a sentence in the form that the API's clients show, and never an error of the server.
#[test]
fn bad_input_is_a_sentence() {
    let server = Server::start(&[]);
    let start = |picture: &str| json!({ "prompt": "x", "start": { "picture": picture } });
    let mut picture = Vec::new();
    let image = image::RgbImage::new(8, 8);
    image.write_to(&mut std::io::Cursor::new(&mut picture), image::ImageFormat::Png).unwrap();
    let good = machine::base64(&picture);
    let cases = [
        ("/api/jobs", json!({ "prompt": 3 }), 400, "expected a string"),
        ("/api/jobs", json!({ "prompt": "x", "promt": "y" }), 400, "unknown field"),
        ("/api/jobs", json!({ "prompt": "x", "model": "dmeo" }), 404, "did you mean"),
        ("/api/jobs", json!({ "prompt": "x", "model": "../../etc/passwd" }), 404, "there is no model"),
        ("/api/jobs", json!({ "prompt": "x", "sampler": "eulr" }), 400, "there is no sampler"),
        ("/api/jobs", json!({ "prompt": "x", "loras": [{ "name": "../outline" }] }), 404, "there is no LoRA"),
        ("/api/jobs", json!({ "prompt": "x", "steps": 100_000 }), 400, "100000 steps"),
        ("/api/jobs", json!({ "prompt": "x", "count": 1_000_000 }), 400, "1000000 pictures"),
        ("/api/jobs", json!({ "prompt": "x", "width": 100_000, "height": 100_000 }), 400, "too many"),
        ("/api/jobs", start("not base64!"), 400, "start.picture is no picture in base64"),
        ("/api/jobs", start("aGVsbG8="), 400, "start.picture is not a PNG, JPEG or WebP picture"),
        ("/sdapi/v1/txt2img", json!([]), 400, "not a JSON object"),
        ("/sdapi/v1/txt2img", json!({ "prompt": "x", "width": "wide" }), 400, "expected usize"),
        ("/sdapi/v1/txt2img", json!({ "prompt": "x", "width": 63 }), 400, "63"),
        ("/sdapi/v1/txt2img", json!({ "prompt": "x", "sampler_name": "Eule" }), 400, "there is no sampler"),
        ("/sdapi/v1/txt2img", json!({ "prompt": "<lora:no:1>" }), 404, "no"),
        ("/sdapi/v1/txt2img", json!({ "prompt": "x", "restore_faces": true }), 422, "faces"),
        (
            "/sdapi/v1/txt2img",
            json!({ "prompt": "x", "alwayson_scripts": { "ADetailer": { "args": [true] } } }),
            422,
            "ADetailer",
        ),
        ("/sdapi/v1/img2img", json!({ "prompt": "x" }), 400, "init_images has 0 pictures"),
        (
            "/sdapi/v1/img2img",
            json!({ "prompt": "x", "init_images": [good], "denoising_strength": 2 }),
            400,
            "strength 2",
        ),
        ("/sdapi/v1/options", json!({ "sd_model_checkpoint": "nothing" }), 404, "there is no model"),
        (
            "/sdapi/v1/options",
            json!({ "forge_additional_modules": ["/etc/passwd"] }),
            404,
            "there is no text encoder",
        ),
        (
            "/sdapi/v1/extra-single-image",
            json!({ "image": good, "upscaler_1": "4x-Ultra" }),
            404,
            "there is no upscaler",
        ),
        (
            "/sdapi/v1/extra-single-image",
            json!({ "image": good, "upscaling_resize": 1e9 }),
            400,
            "upscaling_resize",
        ),
        ("/controlnet/detect", json!({ "controlnet_module": "openpose" }), 400, "there is no hint"),
        ("/v1/images/generations", json!({ "prompt": "x", "model": "sora" }), 404, "there is no model"),
        ("/v1/images/generations", json!({ "prompt": "x", "size": "big" }), 400, "512x512"),
        ("/v1/images/generations", json!({ "prompt": "x", "n": 1000 }), 400, "1000 pictures"),
    ];
    for (path, body, expected, words) in cases {
        let (status, reply) = server.post(path, body.clone());
        let message = match path {
            "/api/jobs" => reply["error"]["message"].as_str(),
            path if path.starts_with("/v1/images") => reply["error"]["message"].as_str(),
            _ => reply["detail"].as_str(),
        };
        let message = message.unwrap_or_else(|| panic!("{path} {body}: {reply}"));
        assert!(status == expected && message.contains(words), "{path} {body}: {status} {reply}");
    }
    let (status, reply) = server.send("/api/jobs", b"{\"prompt\": ");
    assert!(status == 400 && reply["error"]["message"].as_str().unwrap().contains("EOF"), "{reply}");
    assert_eq!(server.send("/api/jobs", &[b' '; (64 << 20) + 1]).0, 413);
    assert_eq!(server.send("/api/metadata", b"no picture").0, 400);
    for path in [
        "/nothing",
        "/api/jobs/0",
        "/api/jobs/0/pictures/x",
        "/api/models/..%2F..%2Fetc",
        "/page/../../etc/passwd",
    ] {
        assert_eq!(server.get(path).0, 404, "{path}");
    }
    assert_eq!(server.get("/sdapi/v1/txt2img").0, 405);
    // Models refuse sizes and strengths only when they are open, so the job fails instead.
    let (_, job) = server.post("/api/jobs", json!({ "prompt": "x", "width": 63 }));
    let failed = server.ended(job["id"].as_str().unwrap());
    assert_eq!(
        (&failed["state"], &failed["error"]["code"]),
        (&json!("failed"), &json!("invalid")),
        "{failed}"
    );
    server.draws(json!({ "prompt": PROMPT, "steps": 1 }));
}

/// Other machines and web pages elsewhere need a key or a permission.
#[test]
fn strangers_stay_out() {
    let server = Server::start(&["--allow-origin", "https://friend.example"]);
    let with = |name: &str, value: &str| server.request("GET", "/sdapi/v1/options", &[(name, value)]).0;
    assert_eq!(with("Host", "evil.example"), 403);
    assert_eq!(with("Origin", "https://evil.example"), 403);
    assert_eq!((with("Origin", "https://friend.example"), with("Origin", &server.base)), (200, 200));
    let preflight = server.request("OPTIONS", "/sdapi/v1/txt2img", &[("Origin", "https://friend.example")]);
    assert_eq!(preflight.0, 204);
    let head = preflight.1.to_lowercase();
    assert!(head.contains("access-control-allow-origin: https://friend.example"), "{head}");
    assert!(head.contains("access-control-allow-headers: authorization, content-type"), "{head}");
    drop(server);

    let server = Server::start(&["--api-key", "me:secret"]);
    let with = |value: &str| server.request("GET", "/v1/models", &[("Authorization", value)]).0;
    assert_eq!(server.get("/").0, 401);
    assert_eq!(
        (with("Bearer me:secret"), with("Bearer secret"), with("Basic bWU6c2VjcmV0")),
        (200, 401, 200)
    );

    let mut open = Command::new(folder("SDRUN_DIST").join("sdrun"));
    let refused = open.args(["serve", "--listen", "0.0.0.0:0"]).env("SDRUN_CONFIG", "").output().unwrap();
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(
        refused.status.code() == Some(4) && text.contains("no key") && text.contains("set a key"),
        "{text}"
    );
    let other = Server::start(&[]);
    let port = other.address().rsplit_once(':').unwrap().1.to_string();
    let mut second = Command::new(folder("SDRUN_DIST").join("sdrun"));
    let refused = second.args(["serve", "--port", &port]).env("SDRUN_CONFIG", "").output().unwrap();
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && text.contains("cannot listen on"), "{text}");
}

/// Easy Diffusion starts an engine named `sdkit` with its own options, and the engine goes when Easy Diffusion does.
#[test]
fn easy_diffusion_can_start_it() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("sdkit");
    std::os::unix::fs::symlink(folder("SDRUN_DIST").join("sdrun"), &program).unwrap();
    for name in ["models", "vae", "lora"] {
        fs::create_dir(dir.path().join(name)).unwrap();
    }
    let mut parent = Command::new("sleep").arg("600").spawn().unwrap();
    let at = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
    let pid = parent.id().to_string();
    let arguments = [
        "--ckpt-dir",
        &at("models"),
        "--vae-dir",
        &at("vae"),
        "--hypernetwork-dir",
        &at("none"),
        "--gfpgan-models-path",
        &at("none"),
        "--realesrgan-models-path",
        &at("none"),
        "--lora-dir",
        &at("lora"),
        "--codeformer-models-path",
        &at("none"),
        "--embeddings-dir",
        &at("none"),
        "--controlnet-dir",
        &at("none"),
        "--text-encoder-dir",
        &at("none"),
        "--port",
        "0",
        "--parent-pid",
        &pid,
        "--log-level",
        "debug",
        "--diffusion-fa",
        "--chroma-disable-dit-mask",
        "--offload-to-cpu",
        "--vae-tiling",
        "--vae-tile-size",
        "512x512",
    ];
    let mut server = Server::of(Command::new(&program).args(arguments));
    assert_eq!(server.get("/v1/internal/ping").0, 200);
    parent.kill().unwrap();
    parent.wait().unwrap();
    assert!(server.child.wait().unwrap().success());
}

/// The page is part of the program, and runs nothing from elsewhere.
#[test]
fn the_page_is_served() {
    let server = Server::start(&[]);
    for (path, kind) in
        [("/", "text/html"), ("/page/style.css", "text/css"), ("/page/app.js", "text/javascript")]
    {
        let (status, head) = server.request("GET", path, &[]);
        let head = head.to_lowercase();
        assert!(status == 200 && head.contains(&format!("content-type: {kind}")), "{path}: {head}");
        assert!(head.contains("content-security-policy: default-src 'self'"), "{head}");
    }
    let page = String::from_utf8(server.bytes("/")).unwrap();
    let names = page.replace("http://www.w3.org/2000/svg", "");
    assert!(page.contains("id=\"prompt\"") && !names.contains("http://") && !names.contains("https://"));
}

/// docs/openapi.json matches the document that the server generates. `SDRUN_BLESS=1` rewrites it.
#[test]
fn the_document_of_the_api_is_current() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/openapi.json");
    let current = sdrun_server::openapi();
    if std::env::var_os("SDRUN_BLESS").is_some() {
        fs::write(&file, &current).unwrap();
    }
    assert!(fs::read_to_string(&file).unwrap() == current, "run this test with SDRUN_BLESS=1");
    let server = Server::start(&[]);
    let served: Value = serde_json::from_slice(&server.bytes("/openapi.json")).unwrap();
    assert_eq!(served, serde_json::from_str::<Value>(&current).unwrap());
}

/// Runs a script of `tests/serve` with the server's address.
fn script(name: &str, server: &Server, arguments: &[&str]) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("serve").join(name);
    let mut python = Command::new(std::env::var_os("SDRUN_SERVE_PYTHON").unwrap());
    let status = python.arg(file).arg(&server.base).args(arguments).status().unwrap();
    assert!(status.success(), "{name}: {status}");
}

/// The packages `openai` and `webuiapi`, and the requests of Open WebUI, SillyTavern and Easy Diffusion.
#[test]
#[ignore = "needs SDRUN_SERVE_PYTHON; run by `cargo xtask test`"]
fn clients_get_their_pictures() {
    script("clients.py", &Server::start(&[]), &[]);
}

/// The page in a browser: draws, cancels, restores settings, paints a mask, works by keyboard and on a narrow screen.
#[test]
#[ignore = "needs SDRUN_SERVE_PYTHON and a browser; run by `cargo xtask test`"]
fn the_page_works_in_a_browser() {
    script("page.py", &Server::start(&[]), &[]);
}

/// Requests that schemathesis makes up from the document of the API. None is answered with an error of the server.
#[test]
#[ignore = "needs SDRUN_SERVE_PYTHON; run by `cargo xtask test`"]
fn made_up_requests_never_break_it() {
    let server = Server::start(&[]);
    let python = std::env::var_os("SDRUN_SERVE_PYTHON").unwrap();
    let program = Path::new(&python).with_file_name("schemathesis");
    let dir = tempfile::tempdir().unwrap();
    let status = Command::new(program)
        .args(["run", &format!("{}/openapi.json", server.base), "--checks", "not_a_server_error"])
        // A stream of events has no end that a client could wait for.
        .args([
            "--exclude-path",
            "/api/jobs/{id}/events",
            "--max-examples",
            "40",
            "--seed",
            "1",
            "--phases",
            "examples,coverage,fuzzing",
        ])
        // Requests wait for those before them: only a hang takes this long.
        .args(["--request-timeout", "600", "--workers", "2"])
        .current_dir(dir.path())
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
    server.draws(json!({ "prompt": PROMPT, "steps": 1 }));
}
