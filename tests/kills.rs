//! Interruptions at random moments: `kill -9` for a command, its worker or both; SIGINT, SIGTERM or SIGHUP for a command; a closed pipe
//! where its output goes. The next command must compute the right numbers, and no half-written or temporary file may be left.
//!
//! `SDRUN_KILLS` sets how many (default: 60) and `SDRUN_KILLS_SEED` chooses the moments.

#![allow(clippy::unwrap_used)]
#![cfg(target_os = "linux")]

#[path = "victims/mod.rs"]
mod victims;

use rustix::process::{Pid, Signal, kill_process};
use sdrun_tests::{
    machine::{LIMIT, PROVIDERS, children, finish},
    random::Random,
};
use std::{
    fs,
    io::Read,
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use victims::Victims;

/// What happens to a command.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Blow {
    Kill,
    KillWorker,
    KillBoth,
    Interrupt,
    Terminate,
    HangUp,
    /// Nobody reads its output any more.
    Deafen,
}

const BLOWS: [Blow; 9] = [
    Blow::Kill,
    Blow::KillWorker,
    Blow::KillBoth,
    Blow::KillWorker,
    Blow::KillBoth,
    Blow::Interrupt,
    Blow::Terminate,
    Blow::HangUp,
    Blow::Deafen,
];

/// How long a command may go on after a signal that asks it to stop. Its workers get 0.4 s.
const PATIENCE: Duration = Duration::from_secs(3);

impl Victims {
    /// A random command.
    fn command(&self, random: &mut Random) -> Command {
        let provider = random.pick(&PROVIDERS);
        let isolated = ["--isolate"];
        let more: &[&str] = if random.below(2) == 0 { &isolated } else { &[] };
        let built = format!("{provider}.sdengine");
        match random.below(8) {
            0 | 1 => {
                // Then it builds and stores an engine again.
                let _ = fs::remove_dir_all(self.cache().join("engines"));
                self.run(provider, more)
            }
            2 => self.run(provider, &[more, &["--weights", "w.safetensors"]].concat()),
            3 => self.run(provider, more),
            4 => {
                let output = ["build", "model.onnx", "-p", provider, "-o", &built];
                self.machine.sdrun(&[&output[..], more].concat())
            }
            5 => {
                let refit = ["refit", &built, "--weights", "w.safetensors", "-o", "baked.sdengine"];
                self.machine.sdrun(&[&refit[..], more].concat())
            }
            6 => self.machine.sdrun(&["cache", "gc", "--max-size", "1B"]),
            _ => self.install(),
        }
    }

    /// Starts a command, strikes at a random moment, and waits for the end of all processes. Returns what it did, and whether anything was
    /// alive.
    fn kill(&self, random: &mut Random) -> (String, bool) {
        let mut command = self.command(random);
        let blow = random.pick(&BLOWS);
        // Most commands take a tenth of a second; later blows meet commands that are done. Small delays are as likely as large ones.
        let longest = random.pick(&[2_000, 20_000, 80_000, 400_000]);
        let delay = Duration::from_micros(random.below(longest) as u64);
        let told = format!("{command:?}, {blow:?} after {delay:?}");
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let words = std::thread::spawn(move || {
            let mut text = Vec::new();
            err.read_to_end(&mut text).map(|_| String::from_utf8_lossy(&text).into_owned()).unwrap()
        });
        let started = Instant::now();
        let mut workers = Vec::new();
        while started.elapsed() < delay && child.try_wait().unwrap().is_none() {
            workers = children(child.id());
            std::thread::sleep(Duration::from_micros(300));
        }
        let send = |pid: u32, signal: Signal| {
            let _ = kill_process(Pid::from_raw(pid as i32).unwrap(), signal);
        };
        let hit = match blow {
            Blow::KillWorker => workers.iter().any(|pid| alive(*pid)),
            _ => child.try_wait().unwrap().is_none(),
        };
        if matches!(blow, Blow::KillWorker | Blow::KillBoth) {
            workers.iter().for_each(|pid| send(*pid, Signal::KILL));
        }
        // Of a command that has ended, the number may belong to another process.
        if hit {
            match blow {
                Blow::Kill | Blow::KillBoth => send(child.id(), Signal::KILL),
                Blow::Interrupt => send(child.id(), Signal::INT),
                Blow::Terminate => send(child.id(), Signal::TERM),
                Blow::HangUp => send(child.id(), Signal::HUP),
                Blow::KillWorker | Blow::Deafen => {}
            }
        }
        let reader = (blow != Blow::Deafen).then_some(out);
        let since = Instant::now();
        let limit = if blow == Blow::KillWorker || blow == Blow::Deafen { LIMIT } else { PATIENCE };
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            assert!(since.elapsed() < limit, "{told}: it goes on for {:?}", since.elapsed());
            std::thread::sleep(Duration::from_millis(1));
        };
        drop(reader);
        let text = words.join().unwrap();
        match (status.code(), blow) {
            // It was done, or it was killed, or stopped before it could listen to signals.
            (Some(0), _) => {}
            (None, Blow::Kill | Blow::KillBoth) => {}
            (None, Blow::Interrupt | Blow::Terminate | Blow::HangUp) if delay < Duration::from_millis(40) => {
            }
            (Some(130), Blow::Interrupt | Blow::Terminate | Blow::HangUp) => {}
            (Some(11), Blow::KillWorker | Blow::KillBoth) => {}
            // An engine that does not exist cannot be refitted, and not every provider stores weights.
            (Some(3 | 6), _) if told.contains("refit") => {}
            (code, _) => panic!("{told}: exit code {code:?} ({status}): {text}"),
        }
        assert!(!text.contains("panick"), "{told}: {text}");
        let deadline = Instant::now() + Duration::from_secs(5);
        for worker in workers {
            while alive(worker) {
                assert!(Instant::now() < deadline, "{told}: worker {worker} outlives its command");
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        (told, hit)
    }

    /// What is there is right.
    fn check(&self, random: &mut Random, told: &str) {
        let y = self.read("y.npy");
        assert!(self.expected.contains(&y), "{told}: y.npy has {} bytes of something else", y.len());
        let at = random.below(2);
        let provider = random.pick(&PROVIDERS);
        let outcome = finish(&mut self.run(provider, [&[][..], &["--weights", "w.safetensors"]][at]));
        assert_eq!(outcome.code, Some(0), "{told}, then {provider}: {}", outcome.stderr);
        assert!(!outcome.stderr.contains("aside"), "{told}: a damaged entry: {}", outcome.stderr);
        assert!(self.read("y.npy") == self.expected[at], "{told}, then {provider}: wrong numbers");
        self.check_files(told);
    }
}

/// Whether a process runs. One that waits for its parent to notice its end does not.
fn alive(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

#[test]
fn nothing_is_lost() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let victims = Victims::new();
    let mut random = Random(number("SDRUN_KILLS_SEED").unwrap_or(1));
    let (count, mut hits) = (number("SDRUN_KILLS").unwrap_or(60), 0);
    for _ in 0..count {
        let (told, hit) = victims.kill(&mut random);
        hits += u64::from(hit);
        victims.check(&mut random, &told);
    }
    victims.check_nothing_is_left(&[]);
    println!("{hits} of {count} met something alive");
    assert!(3 * hits > count, "only {hits} of {count} met something alive");
}
