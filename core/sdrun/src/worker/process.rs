//! A worker's process: starts it, reads its output, kills it with all its children, and reaps it.

use super::{
    protocol::{FromWorker, receive},
    stderr::Tail,
};
use std::{
    io::{self, BufReader},
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

/// How long a worker that has closed its stdout may take to exit.
const LAST_BREATH: Duration = Duration::from_millis(500);
/// Maximum number of messages queued for the host before the worker must wait.
const QUEUE: usize = 256;

/// Events from the reader thread.
pub(super) enum Event {
    Message(FromWorker),
    /// The process has ended and is reaped; with the reason if it was killed for breaking the protocol.
    Ended(Option<String>),
}

/// How a process ended.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ending {
    Status(ExitStatus),
    /// Other code in this program has reaped it.
    Unknown,
}

pub(super) struct Process {
    pid: u32,
    state: Mutex<State>,
    changed: Condvar,
    pub(super) stderr: Tail,
    #[cfg(windows)]
    job: crate::windows::Job,
}

struct State {
    child: Child,
    /// Set once the process is reaped; from then on its id may belong to another process.
    ending: Option<Ending>,
}

impl Process {
    /// Starts `command` and two threads that read its output.
    pub(super) fn start(
        mut command: Command,
        mark: String,
    ) -> io::Result<(Arc<Self>, ChildStdin, Receiver<Event>)> {
        // A process group of its own (on Windows a job), so that compilers started by the vendor's runtime die with it.
        // PR_SET_PDEATHSIG is not used: it fires when the *thread* that started the worker ends. If the host dies, the
        // worker sees the end of its stdin.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        #[cfg(windows)]
        let job = crate::windows::Job::of(&child).inspect_err(|_| {
            let _ = child.kill();
        })?;
        let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let process = Arc::new(Process {
            pid: child.id(),
            state: Mutex::new(State { child, ending: None }),
            changed: Condvar::new(),
            stderr: Tail::new(mark),
            #[cfg(windows)]
            job,
        });
        let (Some(stdin), Some(stdout), Some(stderr)) = (stdin, stdout, stderr) else {
            process.kill();
            return Err(io::Error::other("it was started without pipes"));
        };
        let (sender, events) = sync_channel(QUEUE);
        let (for_stdout, for_stderr) = (process.clone(), process.clone());
        let threads = [
            thread::Builder::new()
                .name("sdrun-worker-out".into())
                .spawn(move || for_stdout.listen(stdout, &sender)),
            thread::Builder::new()
                .name("sdrun-worker-err".into())
                .spawn(move || for_stderr.stderr.follow(stderr, for_stderr.pid)),
        ];
        for thread in threads {
            if let Err(e) = thread {
                process.kill();
                process.reap(Duration::ZERO);
                return Err(e);
            }
        }
        Ok((process, stdin, events))
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listen(&self, stdout: ChildStdout, events: &SyncSender<Event>) {
        let (mut pipe, mut buffer) = (BufReader::new(stdout), Vec::new());
        let broken = loop {
            match receive(&mut pipe, &mut buffer) {
                Ok(Some(message)) => {
                    if events.send(Event::Message(message)).is_err() {
                        break None;
                    }
                }
                Ok(None) => break None,
                Err(e) => break Some(e.to_string()),
            }
        };
        let forced = self.reap(if broken.is_none() { LAST_BREATH } else { Duration::ZERO });
        let closed = forced && self.wait(Duration::ZERO).is_some_and(|ending| ending.is_sigkill());
        let _ = events.send(Event::Ended(broken.or(closed.then(|| "it closed its stdout".into()))));
    }

    /// Kills the process and all its children. Does nothing if it has ended.
    pub(super) fn kill(&self) {
        let mut state = self.state();
        if state.ending.is_none() {
            self.kill_group();
            let _ = state.child.kill();
        }
    }

    #[cfg(unix)]
    fn kill_group(&self) {
        use rustix::process::{Pid, Signal, kill_process_group};
        if let Some(group) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
    #[cfg(windows)]
    fn kill_group(&self) {
        self.job.kill();
    }

    /// Waits for the process to end, and kills it after `patience`; returns whether it had to.
    fn reap(&self, patience: Duration) -> bool {
        let start = Instant::now();
        let mut pause = Duration::from_millis(1);
        let mut forced = false;
        while !self.try_reap() {
            if start.elapsed() >= patience {
                forced = true;
                self.kill();
            }
            thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        }
        self.changed.notify_all();
        forced
    }

    /// Kills children that a dead worker has left running, since they may hold its pipes open. (The reader thread,
    /// which reaps, waits for the end of stdout.)
    pub(super) fn notice_end(&self) {
        self.clear_away(&mut self.state());
    }

    fn clear_away(&self, state: &mut State) {
        // Until the process is reaped, the number of its group cannot be reused.
        if state.ending.is_none() && self.has_ended(&mut state.child) {
            self.kill_group();
        }
    }

    fn try_reap(&self) -> bool {
        let mut state = self.state();
        self.clear_away(&mut state);
        if state.ending.is_none() {
            state.ending = match state.child.try_wait() {
                Ok(status) => status.map(Ending::Status),
                Err(_) => Some(Ending::Unknown),
            };
        }
        state.ending.is_some()
    }

    /// Whether it has ended. Leaves it unreaped, so that the number of its group stays taken.
    #[cfg(unix)]
    fn has_ended(&self, _: &mut Child) -> bool {
        use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        i32::try_from(self.pid)
            .ok()
            .and_then(Pid::from_raw)
            .is_some_and(|pid| waitid(WaitId::Pid(pid), options).is_ok_and(|status| status.is_some()))
    }
    #[cfg(windows)]
    fn has_ended(&self, child: &mut Child) -> bool {
        matches!(child.try_wait(), Ok(Some(_)))
    }

    /// How it ended; `None` if it has not ended within `limit`.
    pub(super) fn wait(&self, limit: Duration) -> Option<Ending> {
        let state = self.state();
        match self.changed.wait_timeout_while(state, limit, |state| state.ending.is_none()) {
            Ok((state, _)) => state.ending,
            Err(poisoned) => poisoned.into_inner().0.ending,
        }
    }
}

impl std::fmt::Display for Ending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Ending::Status(status) = self else { return f.write_str("for an unknown reason") };
        #[cfg(unix)]
        if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(status) {
            return match signal_name(signal) {
                Some(name) => write!(f, "signal {signal}, {name}"),
                None => write!(f, "signal {signal}"),
            };
        }
        #[cfg(windows)]
        // NTSTATUS values that are errors, and an uncaught C++ exception. `exit(-1)` is neither.
        if let Some(code) =
            status.code().map(|code| code as u32).filter(|code| code >> 28 == 0xC || *code == 0xE06D_7363)
        {
            return match exception_name(code) {
                Some(name) => write!(f, "exception {code:#X}, {name}"),
                None => write!(f, "exception {code:#X}"),
            };
        }
        match status.code() {
            Some(code) => write!(f, "exit code {code}"),
            None => write!(f, "{status}"),
        }
    }
}

impl Ending {
    /// Whether SIGKILL ended it.
    pub(super) fn is_sigkill(&self) -> bool {
        matches!(self, Ending::Status(status) if was_killed(*status))
    }
}

/// Whether SIGKILL ended a process. A crashing process does not send itself that signal.
pub(crate) fn was_killed(status: ExitStatus) -> bool {
    #[cfg(unix)]
    return std::os::unix::process::ExitStatusExt::signal(&status)
        == Some(rustix::process::Signal::KILL.as_raw());
    #[cfg(not(unix))]
    {
        let _ = status;
        false
    }
}

#[cfg(unix)]
fn signal_name(number: i32) -> Option<&'static str> {
    use rustix::process::Signal;
    [
        (Signal::ABORT, "SIGABRT"),
        (Signal::SEGV, "SIGSEGV"),
        (Signal::ILL, "SIGILL"),
        (Signal::FPE, "SIGFPE"),
        (Signal::BUS, "SIGBUS"),
        (Signal::KILL, "SIGKILL"),
        (Signal::TERM, "SIGTERM"),
        (Signal::TRAP, "SIGTRAP"),
        (Signal::PIPE, "SIGPIPE"),
        (Signal::SYS, "SIGSYS"),
        (Signal::XCPU, "SIGXCPU"),
    ]
    .into_iter()
    .find_map(|(signal, name)| (signal.as_raw() == number).then_some(name))
}

/// Names of the codes with which Windows ends a process (ntstatus.h).
#[cfg(windows)]
fn exception_name(code: u32) -> Option<&'static str> {
    [
        (0xC000_0005, "access violation"),
        (0xC000_0006, "a mapped file cannot be read"),
        (0xC000_0017, "out of memory"),
        (0xC000_001D, "illegal instruction"),
        (0xC000_0094, "division by zero"),
        (0xC000_00FD, "stack overflow"),
        (0xC000_0135, "a DLL is missing"),
        (0xC000_0139, "a DLL lacks a function"),
        (0xC000_013A, "Ctrl-C"),
        (0xC000_0142, "a DLL failed to start"),
        (0xC000_0374, "heap corruption"),
        (0xC000_0409, "fail-fast"),
        (0xE06D_7363, "uncaught C++ exception"),
    ]
    .into_iter()
    .find_map(|(known, name)| (known == code).then_some(name))
}

#[cfg(unix)]
#[cfg(test)]
mod tests {
    use super::*;

    fn run(script: &str) -> (Arc<Process>, ChildStdin, Receiver<Event>) {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        Process::start(command, "mark".into()).unwrap()
    }

    fn ending(script: &str) -> (String, Option<String>, String) {
        let (process, _stdin, events) = run(script);
        let Ok(Event::Ended(broken)) = events.recv() else { panic!("a shell sends no messages") };
        process.stderr.wait_for_end(Duration::from_secs(10));
        (process.wait(Duration::ZERO).unwrap().to_string(), broken, process.stderr.text())
    }

    #[test]
    fn tells_how_it_ended() {
        assert_eq!(ending("echo why >&2; exit 3"), ("exit code 3".into(), None, "why".into()));
        assert_eq!(ending("kill -ABRT $$").0, "signal 6, SIGABRT");
        let unnamed = ending("kill -USR2 $$").0;
        assert!(unnamed.starts_with("signal ") && !unnamed.contains(','), "{unnamed}");
    }

    #[test]
    fn invalid_messages_end_it() {
        let (how, broken, _) = ending("printf 'hello, world'; exec sleep 600");
        assert_eq!(how, "signal 9, SIGKILL");
        assert!(broken.unwrap().contains("claims a message of"));
    }

    #[test]
    fn closing_its_stdout_ends_it() {
        let (how, broken, _) = ending("exec >&-; exec sleep 600");
        assert_eq!((how.as_str(), broken.as_deref()), ("signal 9, SIGKILL", Some("it closed its stdout")));
    }

    #[test]
    fn its_children_die_with_it() {
        for end in ["kill -SEGV $$", "exit 0"] {
            // The sleeper holds the shell's stdout, so the end of the shell alone does not show.
            let (process, _stdin, events) = run(&format!("sleep 600 & echo $! >&2; {end}"));
            let start = Instant::now();
            while events.recv_timeout(Duration::from_millis(20)).is_err() {
                assert!(start.elapsed() < Duration::from_secs(60), "the end of the worker goes unnoticed");
                process.notice_end();
            }
            process.stderr.wait_for_end(Duration::from_secs(10));
            let grandchild = format!("/proc/{}/stat", process.stderr.text());
            // init reaps it; without init it stays a zombie.
            let gone = || std::fs::read_to_string(&grandchild).map_or(true, |s| s.contains(") Z "));
            let start = Instant::now();
            while !gone() {
                assert!(start.elapsed() < Duration::from_secs(10), "the worker's child lives on");
                thread::sleep(Duration::from_millis(5));
            }
        }
    }
}
