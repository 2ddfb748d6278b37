//! Measures `sdrun serve`: whether many clients get the right pictures, its memory, and its time beside `sdrun generate`. Prints JSON.
//! `cargo xtask bench serve` runs it.
//!
//!     serve_load

#![allow(clippy::unwrap_used)]

#[cfg(unix)]
#[allow(dead_code, reason = "the tests use the rest")]
#[path = "../serve/machine.rs"]
mod machine;

#[cfg(unix)]
fn main() {
    let load = load::clients();
    let memory = load::memory();
    let pace = load::pace();
    println!("{}", serde_json::json!({ "load": load, "memory": memory, "pace": pace }));
}

#[cfg(not(unix))]
fn main() {}

#[cfg(unix)]
mod load {
    use super::machine::{Server, pixels};
    use sdrun_tests::lab::folder;
    use serde_json::{Value, json};
    use std::{
        process::Command,
        sync::atomic::{AtomicUsize, Ordering::Relaxed},
        thread,
        time::Instant,
    };

    const PROMPT: &str = "a red circle left of a blue square";
    const CLIENTS: usize = 8;
    const REQUESTS: usize = 200;
    /// Every so many requests, a client cancels a job too.
    const CANCELS: usize = 9;

    fn picture(server: &Server, order: &Value) -> Vec<u8> {
        let job = server.draws(order.clone());
        pixels(&server.bytes(job["pictures"][0]["url"].as_str().unwrap()))
    }

    /// 200 requests of 8 clients with different sizes and LoRAs, and cancelled jobs between them. Counts pictures that differ from those that
    /// the same orders give alone.
    pub(super) fn clients() -> Value {
        let server = Server::start(&[]);
        let orders: Vec<Value> = (0..24)
            .map(|n| {
                let strength = [0.0, 0.5, 1.0][n % 3];
                let loras = json!([{ "name": "outline", "strength": strength }]);
                let loras = if n % 2 == 0 { loras } else { json!([]) };
                let (width, height) = [(64, 64), (48, 64), (80, 64), (64, 96)][n % 4];
                json!({ "prompt": PROMPT, "seed": n, "steps": 8, "width": width, "height": height, "loras": loras })
            })
            .collect();
        let alone: Vec<Vec<u8>> = orders.iter().map(|order| picture(&server, order)).collect();
        let (next, wrong, cancelled) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        let began = Instant::now();
        thread::scope(|scope| {
            for _ in 0..CLIENTS {
                scope.spawn(|| {
                    loop {
                        let number = next.fetch_add(1, Relaxed);
                        if number >= REQUESTS {
                            return;
                        }
                        if number % CANCELS == 0 {
                            let (_, job) = server.post("/api/jobs", json!({ "prompt": PROMPT, "count": 16 }));
                            let id = job["id"].as_str().unwrap();
                            server.post(&format!("/api/jobs/{id}/cancel"), json!(null));
                            assert_eq!(server.ended(id)["state"], "cancelled");
                            cancelled.fetch_add(1, Relaxed);
                        }
                        let which = number * 7 % orders.len();
                        if picture(&server, &orders[which]) != alone[which] {
                            wrong.fetch_add(1, Relaxed);
                        }
                    }
                });
            }
        });
        json!({
            "requests": REQUESTS,
            "wrong": wrong.into_inner(),
            "cancelled": cancelled.into_inner(),
            "seconds": began.elapsed().as_secs_f64(),
        })
    }

    fn resident(server: &Server) -> f64 {
        let numbers = String::from_utf8(server.bytes("/metrics")).unwrap();
        let line = numbers.lines().find_map(|line| line.strip_prefix("sdrun_resident_bytes ")).unwrap();
        line.parse().unwrap()
    }

    /// The server's memory while it draws 1,000 pictures for one client after the other.
    pub(super) fn memory() -> Value {
        let server = Server::start(&[]);
        let mut found = Vec::new();
        for number in 0..=1000 {
            let loras = if number % 2 == 0 { json!([]) } else { json!([{ "name": "outline" }]) };
            let side = [64, 48][number % 2];
            picture(
                &server,
                &json!({ "prompt": PROMPT, "seed": number, "steps": 2, "width": side, "height": 64, "loras": loras }),
            );
            if [100, 200, 500, 1000].contains(&number) {
                found.push(json!({ "pictures": number, "bytes": resident(&server) }));
            }
        }
        json!(found)
    }

    const PICTURES: usize = 33;
    const ROUNDS: usize = 5;

    /// Seconds for each picture of a long job, beside those of the command line, in turns. What is done once per job is not counted.
    pub(super) fn pace() -> Value {
        let server = Server::start(&[]);
        // A client that waits for the reply takes no time from the drawing.
        let served = |count: usize| {
            let began = Instant::now();
            let order = json!({ "prompt": PROMPT, "seed": 7, "n": count });
            let (status, reply) = server.post("/v1/images/generations", order);
            assert!(status == 200 && reply["data"].as_array().unwrap().len() == count, "{status}");
            began.elapsed().as_secs_f64()
        };
        let dir = tempfile::tempdir().unwrap();
        let drawn = |count: usize| {
            let began = Instant::now();
            let mut command = Command::new(folder("SDRUN_DIST").join("sdrun"));
            command.args(["generate", PROMPT, "-q", "-p", "ggml", "-s", "7", "-b", &count.to_string()]);
            let done = command.current_dir(dir.path()).env("SDRUN_CONFIG", "").output().unwrap();
            assert!(done.status.success());
            began.elapsed().as_secs_f64()
        };
        served(1);
        let rounds = (0..ROUNDS).map(|_| {
            let each = |of: &dyn Fn(usize) -> f64| (of(PICTURES) - of(1)) / (PICTURES - 1) as f64;
            json!({ "served": each(&served), "generated": each(&drawn) })
        });
        json!(rounds.collect::<Vec<_>>())
    }
}
