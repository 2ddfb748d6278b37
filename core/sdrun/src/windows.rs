//! Windows functions that the standard library lacks, for workers and measurements.
#![allow(unsafe_code)]

use std::{
    fs::File,
    io,
    os::windows::io::{AsHandle, AsRawHandle, FromRawHandle, IntoRawHandle, OwnedHandle},
    process::Child,
    ptr,
};
use windows_sys::Win32::System::{
    Console::{STD_INPUT_HANDLE, STD_OUTPUT_HANDLE, SetStdHandle},
    JobObjects::{
        AssignProcessToJobObject, CreateJobObjectW, JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE,
        JOBOBJECT_EXTENDED_LIMIT_INFORMATION, JobObjectExtendedLimitInformation, SetInformationJobObject,
        TerminateJobObject,
    },
    ProcessStatus::{K32GetProcessMemoryInfo, PROCESS_MEMORY_COUNTERS},
    Threading::{OpenProcess, PROCESS_QUERY_LIMITED_INFORMATION, PROCESS_VM_READ},
};

/// A worker and its children. Windows ends them when this is dropped or this program crashes.
pub(crate) struct Job(OwnedHandle);

impl Job {
    /// Puts a process into a new job. Children that it started before stay outside; a worker starts none before it is greeted.
    pub(crate) fn of(child: &Child) -> io::Result<Self> {
        // SAFETY: null pointers mean default security and no name.
        let handle = unsafe { CreateJobObjectW(ptr::null(), ptr::null()) };
        if handle.is_null() {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it was just opened, and nothing else closes it.
        let job = Job(unsafe { OwnedHandle::from_raw_handle(handle) });
        let mut limits = JOBOBJECT_EXTENDED_LIMIT_INFORMATION::default();
        limits.BasicLimitInformation.LimitFlags = JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE;
        // SAFETY: the class of information takes this structure of this size.
        checked(unsafe {
            SetInformationJobObject(
                handle,
                JobObjectExtendedLimitInformation,
                ptr::from_ref(&limits).cast(),
                size_of_val(&limits) as u32,
            )
        })?;
        // SAFETY: both handles are open.
        checked(unsafe { AssignProcessToJobObject(handle, child.as_raw_handle()) })?;
        Ok(job)
    }

    /// Ends all its processes.
    pub(crate) fn kill(&self) {
        // SAFETY: the handle is open. A failure is ignored: closing the job ends them too.
        unsafe { TerminateJobObject(self.0.as_raw_handle(), 1) };
    }
}

/// Takes over stdin and stdout: output of other code in this process goes to stderr, and its reads return nothing.
pub(crate) fn own_pipes() -> io::Result<(File, File)> {
    let input = io::stdin().as_handle().try_clone_to_owned()?;
    let output = io::stdout().as_handle().try_clone_to_owned()?;
    let nothing = OwnedHandle::from(File::open("NUL")?);
    let errors = io::stderr().as_handle().try_clone_to_owned()?;
    // This program's C runtime, which plugins built with MinGW share, copied the handles when it started. Runtimes that are loaded later
    // ask the system. (One that another library loaded before keeps the old handles.)
    // SAFETY: the name ends with a zero. The calls close the runtime's own copies; `input` and `output` are duplicates.
    unsafe {
        libc::dup2(libc::open(c"NUL".as_ptr(), libc::O_RDONLY), 0);
        libc::dup2(2, 1);
    }
    for (which, handle) in [(STD_INPUT_HANDLE, nothing), (STD_OUTPUT_HANDLE, errors)] {
        // SAFETY: the handle is open, and stays so until the process ends.
        checked(unsafe { SetStdHandle(which, handle.into_raw_handle()) })?;
    }
    Ok((input.into(), output.into()))
}

/// The most memory that a process had in its working set, in bytes.
pub(crate) fn peak_memory(pid: u32) -> Option<u64> {
    // SAFETY: it takes no pointers.
    let handle = unsafe { OpenProcess(PROCESS_QUERY_LIMITED_INFORMATION | PROCESS_VM_READ, 0, pid) };
    if handle.is_null() {
        return None;
    }
    // SAFETY: it was just opened, and nothing else closes it.
    let process = unsafe { OwnedHandle::from_raw_handle(handle) };
    let mut counters = PROCESS_MEMORY_COUNTERS::default();
    let size = size_of_val(&counters) as u32;
    // SAFETY: the handle is open, and it writes at most `size` bytes to `counters`.
    let found = unsafe { K32GetProcessMemoryInfo(process.as_raw_handle(), &mut counters, size) };
    (found != 0).then_some(counters.PeakWorkingSetSize as u64)
}

fn checked(result: i32) -> io::Result<()> {
    if result == 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
