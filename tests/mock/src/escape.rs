//! What an attacker who controls a runtime would try. Each attempt is harmless if it succeeds.

use rustix::process::{getppid, test_kill_process};
use sdrun_abi::InitConfig;
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read},
    net::{TcpListener, TcpStream, UdpSocket},
    os::unix::{fs::symlink, net::UnixStream},
    path::Path,
    process::Command,
    thread,
};

/// Tries to leave the worker. `target` is a folder with the files `secret`, `port` (of a listener) and `socket`, and `target/model` a
/// file that the worker may read. Returns the names of the attempts that succeeded.
pub(crate) fn attempts(target: &Path, config: &InitConfig) -> String {
    let secret = &target.join("secret");
    let model = &target.join("model");
    let temp = &*config.temp_dir;
    let links = config.links_dir.as_deref().unwrap_or(temp);
    let port: u16 = fs::read_to_string(model).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    let host = || getppid().map_or_else(String::new, |pid| format!("/proc/{}", pid.as_raw_nonzero()));
    let tries: [(&str, &dyn Fn() -> io::Result<()>); 24] = [
        // What it needs.
        ("read-model", &|| read(model)),
        ("write-temp", &|| fs::write(temp.join("x"), "x")),
        ("link-model", &|| fs::hard_link(model, links.join("model"))),
        ("read-link", &|| read(&links.join("model"))),
        ("move-to-links", &|| fs::rename(temp.join("x"), links.join("x"))),
        // The user's files.
        ("read", &|| read(secret)),
        ("read-in-thread", &|| thread::scope(|s| s.spawn(|| read(secret)).join().unwrap_or(Ok(())))),
        ("read-by-root", &|| read(Path::new(&format!("/proc/self/root{}", secret.display())))),
        ("read-by-symlink", &|| symlink(secret, temp.join("soft")).and_then(|()| read(&temp.join("soft")))),
        ("read-by-link", &|| {
            fs::hard_link(secret, links.join("hard")).and_then(|()| read(&links.join("hard")))
        }),
        ("list", &|| fs::read_dir(target).map(drop)),
        ("write", &|| fs::write(target.join("new"), "x")),
        ("overwrite-model", &|| OpenOptions::new().append(true).open(model).map(drop)),
        ("overwrite-by-link", &|| OpenOptions::new().append(true).open(links.join("model")).map(drop)),
        ("move-link-to-temp", &|| fs::rename(links.join("model"), temp.join("model"))),
        ("remove", &|| fs::remove_file(target.join("removable"))),
        // Other processes.
        ("execute", &|| Command::new("/bin/true").status().map(drop)),
        ("host-memory", &|| File::open(format!("{}/mem", host())).map(drop)),
        ("signal", &|| Ok(getppid().map_or(Err(rustix::io::Errno::SRCH), test_kill_process)?)),
        // More memory than the sandbox of the test allows.
        ("allocate", &|| Ok(Vec::<u8>::new().try_reserve_exact(2 << 30)?)),
        // The network.
        ("connect", &|| TcpStream::connect(("127.0.0.1", port)).map(drop)),
        ("listen", &|| TcpListener::bind("127.0.0.1:0").map(drop)),
        ("udp", &|| UdpSocket::bind("127.0.0.1:0").map(drop)),
        ("unix-socket", &|| UnixStream::connect(target.join("socket")).map(drop)),
    ];
    let done = tries.iter().filter(|(_, attempt)| attempt().is_ok());
    done.map(|(name, _)| *name).collect::<Vec<_>>().join(" ")
}

fn read(path: &Path) -> io::Result<()> {
    File::open(path)?.read_to_end(&mut Vec::new()).map(drop)
}
