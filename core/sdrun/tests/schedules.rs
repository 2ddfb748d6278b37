//! The worker's end of the pipes in many orders of its threads, which shuttle chooses at random.

#![allow(clippy::unwrap_used)]

mod worker {
    use pipe::Pipe;
    use protocol::{FromWorker, HOST, ToWorker};
    use shuttle::{
        sync::{Arc, mpsc::channel},
        thread,
    };
    use std::fs::File;

    mod sync {
        pub(super) use shuttle::sync::{Mutex, MutexGuard, atomic::AtomicU64, mpsc::Receiver};
    }

    /// Messages that are numbers.
    mod protocol {
        use shuttle::sync::mpsc::Sender;
        use std::{cell::RefCell, fs::File, io};

        #[derive(Debug, PartialEq)]
        pub(crate) enum FromWorker {
            Question(u64),
            #[allow(dead_code, reason = "for a message that is too long")]
            Failed(sdrun_abi::Error),
        }

        #[derive(Debug, PartialEq)]
        pub(crate) enum ToWorker {
            Answer(u64),
        }

        thread_local! {
            /// Where messages go. All threads of shuttle are one.
            pub(crate) static HOST: RefCell<Option<Sender<u64>>> = const { RefCell::new(None) };
        }

        pub(crate) fn send(_: &mut File, _: &mut Vec<u8>, message: &FromWorker) -> io::Result<()> {
            let FromWorker::Question(number) = message else { return Err(io::ErrorKind::Other.into()) };
            let host = HOST.with_borrow(|host| host.clone().unwrap());
            host.send(*number).map_err(|_| io::ErrorKind::BrokenPipe.into())
        }
    }

    #[allow(dead_code)]
    #[path = "../../src/worker/pipe.rs"]
    mod pipe;

    /// Several threads of a provider ask for weights at the same time, and the host answers one question after the other.
    #[test]
    fn each_question_gets_its_answer() {
        let run = || {
            let (to_host, questions) = channel::<u64>();
            let (answers, to_worker) = channel();
            HOST.set(Some(to_host));
            let host = thread::spawn(move || {
                for number in questions.iter() {
                    answers.send(ToWorker::Answer(number)).unwrap();
                }
            });
            let out = File::open(std::env::current_exe().unwrap()).unwrap();
            let pipe = Arc::new(Pipe::new(out, to_worker, String::new()));
            let asks = |first: u64| {
                let pipe = pipe.clone();
                thread::spawn(move || {
                    for number in first..first + 3 {
                        assert_eq!(pipe.ask(&FromWorker::Question(number)), ToWorker::Answer(number));
                    }
                })
            };
            let threads = [10, 20, 30].map(asks);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            HOST.set(None);
            host.join().unwrap();
        };
        shuttle::check_random(run, 2_000);
    }

    /// The host's cancel may arrive before, during or after the call it is for. It never reaches the next one.
    #[test]
    fn a_cancel_is_for_one_call() {
        let run = || {
            let out = File::open(std::env::current_exe().unwrap()).unwrap();
            let pipe = Arc::new(Pipe::new(out, channel().1, String::new()));
            let reader = pipe.clone();
            pipe.begin(1);
            let cancel = thread::spawn(move || reader.cancel(1));
            pipe.begin(2);
            assert!(!pipe.is_cancelled());
            cancel.join().unwrap();
            assert!(!pipe.is_cancelled());
            pipe.cancel(2);
            assert!(pipe.is_cancelled());
        };
        shuttle::check_random(run, 500);
    }
}
