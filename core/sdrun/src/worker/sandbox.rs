//! What a worker may do. On Linux, Landlock limits the files that it may open, and seccomp keeps it from the network and from starting
//! programs. If a hostile model exploits a bug in a runtime, it still cannot reach the user's files or other machines.

use crate::trust;
use serde::{Deserialize, Serialize};
use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

/// What a worker may use besides the system's libraries. Paths must be real, without links.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sandbox {
    /// Files and folders that it may read.
    pub readable: Vec<PathBuf>,
    /// Folders in which it may also write.
    pub writable: Vec<PathBuf>,
    /// Device files that it may use.
    pub devices: Vec<PathBuf>,
    /// A folder of links to readable files: it may read, link, move and remove files there, but not write to them.
    pub linkable: Option<PathBuf>,
    /// The most memory that it may allocate, in bytes.
    pub memory: Option<u64>,
}

/// How far a sandbox holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Confinement {
    /// Everything in [`Sandbox`] is enforced.
    Full,
    /// The kernel is too old for some of it.
    Partial,
    /// The worker has all rights of the user. The system has no sandbox, or the host started the worker without one.
    None,
}

/// Variables that name further files of drivers, separated by `:`.
const DRIVERS: [&str; 6] = [
    "VK_DRIVER_FILES",
    "VK_ICD_FILENAMES",
    "VK_ADD_DRIVER_FILES",
    "VK_LAYER_PATH",
    "OCL_ICD_VENDORS",
    "LD_LIBRARY_PATH",
];

/// Folders of the drivers and libraries that the user's environment names, except those in which others can change something.
pub(crate) fn driver_folders() -> Vec<PathBuf> {
    driver_folders_in(trust::environment)
}

fn driver_folders_in(environment: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for variable in DRIVERS {
        let Some(value) = environment(variable) else { continue };
        for path in std::env::split_paths(&value).filter(|path| path.is_absolute()) {
            let Ok(real) = dunce::canonicalize(&path) else { continue };
            let folder = if real.is_dir() { Some(&*real) } else { real.parent() };
            // Drivers lie beside the files that describe them.
            let Some(folder) = folder.filter(|folder| folder.parent().is_some()) else { continue };
            match check_content(folder) {
                Ok(()) => found.push(folder.to_path_buf()),
                Err(why) => tracing::warn!("workers cannot use the folders of {variable}: {why}"),
            }
        }
    }
    found
}

/// Checks that only root and the current user can change a folder and what is in it.
fn check_content(folder: &Path) -> Result<(), String> {
    let cannot_read = |e| format!("cannot read {}: {e}", folder.display());
    for entry in std::fs::read_dir(folder).map_err(cannot_read)? {
        let path = entry.map_err(cannot_read)?.path();
        // Nothing can be loaded through a link that leads nowhere.
        if path.exists() {
            trust::check_owner(&path)?;
        }
    }
    Ok(())
}

#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
pub(super) fn enter(_: &Sandbox) -> sdrun_abi::Result<Confinement> {
    Ok(Confinement::None)
}

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(super) use linux::enter;

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod linux {
    use super::{Confinement, Sandbox};
    use landlock::{
        ABI, Access, AccessFs, AccessNet, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError,
        RulesetStatus, Scope, path_beneath_rules,
    };
    use rustix::process::{Resource, Rlimit, setrlimit};
    use sdrun_abi::{Error, Result};
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
    use std::collections::BTreeMap;

    /// The system's files that runtimes and drivers read: libraries, what the kernel says about the hardware, lists of drivers.
    const SYSTEM: [&str; 30] = [
        "/usr",
        "/lib",
        "/lib32",
        "/lib64",
        "/opt",
        "/nix/store",
        "/gnu/store",
        "/proc",
        "/sys",
        "/run/opengl-driver",
        "/run/opengl-driver-32",
        "/run/udev",
        "/etc/alternatives",
        "/etc/drirc",
        "/etc/egl",
        "/etc/glvnd",
        "/etc/group",
        "/etc/host.conf",
        "/etc/hosts",
        "/etc/ld.so.cache",
        "/etc/ld.so.conf",
        "/etc/ld.so.conf.d",
        "/etc/ld.so.preload",
        "/etc/localtime",
        "/etc/nsswitch.conf",
        "/etc/OpenCL",
        "/etc/os-release",
        "/etc/passwd",
        "/etc/ssl/openssl.cnf",
        "/etc/vulkan",
    ];

    /// Devices that every program may use.
    const DEVICES: [&str; 5] = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"];

    /// The version of Landlock that is used as far as the kernel has it.
    const VERSION: ABI = ABI::V6;

    /// System calls that a runtime does not need, and that lead out of the sandbox: sockets, other programs and their memory, calls that
    /// bypass this list, and those for administrators.
    const REFUSED: [i64; 35] = [
        libc::SYS_socket,
        libc::SYS_execve,
        libc::SYS_execveat,
        libc::SYS_ptrace,
        libc::SYS_process_vm_readv,
        libc::SYS_process_vm_writev,
        libc::SYS_pidfd_getfd,
        libc::SYS_io_uring_setup,
        libc::SYS_io_uring_enter,
        libc::SYS_io_uring_register,
        libc::SYS_bpf,
        libc::SYS_perf_event_open,
        libc::SYS_userfaultfd,
        libc::SYS_add_key,
        libc::SYS_request_key,
        libc::SYS_keyctl,
        libc::SYS_mount,
        libc::SYS_umount2,
        libc::SYS_move_mount,
        libc::SYS_open_tree,
        libc::SYS_fsopen,
        libc::SYS_pivot_root,
        libc::SYS_chroot,
        libc::SYS_setns,
        libc::SYS_unshare,
        libc::SYS_open_by_handle_at,
        libc::SYS_init_module,
        libc::SYS_finit_module,
        libc::SYS_delete_module,
        libc::SYS_kexec_load,
        libc::SYS_reboot,
        libc::SYS_swapon,
        libc::SYS_swapoff,
        libc::SYS_settimeofday,
        libc::SYS_clock_settime,
    ];
    /// Bit of the calls of the x32 ABI, which x86-64 kernels may offer beside their own.
    const X32: i64 = 0x4000_0000;

    /// Confines this thread and those that it starts, for good. Call it before there are others.
    ///
    /// # Errors
    /// If the kernel offers a means and refuses to apply it.
    pub(in super::super) fn enter(sandbox: &Sandbox) -> Result<Confinement> {
        if let Some(most) = sandbox.memory {
            // Writable private memory. Mapped files do not count.
            let limit = Rlimit { current: Some(most), maximum: Some(most) };
            setrlimit(Resource::Data, limit)
                .map_err(|e| Error::precondition(format!("cannot limit the worker's memory: {e}")))?;
        }
        let confined = confine_files(sandbox)
            .map_err(|e| Error::precondition(format!("cannot limit the worker's access to files: {e}")))?;
        refuse_calls()
            .map_err(|e| Error::precondition(format!("cannot limit the worker's system calls: {e}")))?;
        Ok(confined)
    }

    fn confine_files(sandbox: &Sandbox) -> std::result::Result<Confinement, RulesetError> {
        let read = AccessFs::ReadFile | AccessFs::ReadDir;
        let arrange = AccessFs::MakeReg
            | AccessFs::MakeDir
            | AccessFs::RemoveFile
            | AccessFs::RemoveDir
            | AccessFs::Refer;
        let write = read | arrange | AccessFs::WriteFile | AccessFs::Truncate;
        let devices = read | AccessFs::WriteFile | AccessFs::IoctlDev;
        let holders: Vec<_> = sandbox.readable.iter().filter_map(|path| path.parent()).collect();
        let status = Ruleset::default()
            .handle_access(AccessFs::from_all(VERSION))?
            .handle_access(AccessNet::from_all(VERSION))?
            .scope(Scope::from_all(VERSION))?
            .create()?
            .add_rules(path_beneath_rules(SYSTEM, read))?
            .add_rules(path_beneath_rules(DEVICES, devices))?
            .add_rules(path_beneath_rules(&sandbox.devices, devices))?
            .add_rules(path_beneath_rules(&sandbox.readable, read))?
            // Without this, the files cannot be linked. It does not allow to read them.
            .add_rules(path_beneath_rules(holders, AccessFs::Refer))?
            .add_rules(path_beneath_rules(&sandbox.writable, write))?
            .add_rules(path_beneath_rules(&sandbox.linkable, read | arrange))?
            .restrict_self()?;
        Ok(match status.ruleset {
            RulesetStatus::FullyEnforced => Confinement::Full,
            RulesetStatus::PartiallyEnforced => Confinement::Partial,
            RulesetStatus::NotEnforced => Confinement::None,
        })
    }

    fn refuse_calls() -> std::result::Result<(), Box<dyn std::error::Error>> {
        let mut rules = BTreeMap::new();
        for call in REFUSED {
            rules.insert(call, vec![]);
            if cfg!(target_arch = "x86_64") {
                rules.insert(call | X32, vec![]);
            }
        }
        let refuse = SeccompAction::Errno(libc::EPERM as u32);
        let filter =
            SeccompFilter::new(rules, SeccompAction::Allow, refuse, std::env::consts::ARCH.try_into()?)?;
        let program: BpfProgram = filter.try_into()?;
        Ok(seccompiler::apply_filter(&program)?)
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::PermissionsExt};

    #[test]
    fn folders_that_others_can_change_stay_closed() {
        let folders = ["private", "file", "folder"].map(|name| {
            let dir = tempfile::Builder::new().prefix(name).tempdir().unwrap();
            let library = dir.path().join("libdriver.so");
            fs::write(&library, "").unwrap();
            std::os::unix::fs::symlink("nowhere", dir.path().join("libgone.so")).unwrap();
            let mode =
                |changed: bool, mode| fs::Permissions::from_mode(if changed { mode | 0o022 } else { mode });
            fs::set_permissions(&library, mode(name == "file", 0o644)).unwrap();
            fs::set_permissions(dir.path(), mode(name == "folder", 0o755)).unwrap();
            dir
        });
        let paths = std::env::join_paths(folders.iter().map(|dir| dir.path())).unwrap();
        let found = driver_folders_in(|name| (name == "LD_LIBRARY_PATH").then(|| paths.clone()));
        assert_eq!(found, [dunce::canonicalize(folders[0].path()).unwrap()]);
    }
}
