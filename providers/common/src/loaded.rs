use once_cell::sync::OnceCell;
use sdrun_abi::{Error, Result};
use std::path::{Path, PathBuf};

/// A vendor runtime, loaded once for the lifetime of the process.
///
/// A process can hold only one copy of a runtime, because its libraries find each other by name. If the first load fails,
/// it can be tried again. Threads that load at the same time wait for each other.
pub struct Loaded<T> {
    /// For messages, for example `OpenVINO`.
    name: &'static str,
    runtime: OnceCell<(PathBuf, T)>,
}

impl<T> Loaded<T> {
    /// Nothing is loaded yet. `name` is the runtime's name, for messages.
    pub const fn new(name: &'static str) -> Self {
        Loaded { name, runtime: OnceCell::new() }
    }

    /// Loads the runtime from `library`, or returns the one already loaded from there.
    ///
    /// # Errors
    /// Those of `load`; `FailedPrecondition` if another file was loaded before.
    pub fn load(&self, library: &Path, load: impl FnOnce(&Path) -> Result<T>) -> Result<&T> {
        let (from, runtime) =
            self.runtime.get_or_try_init(|| Ok::<_, Error>((library.to_path_buf(), load(library)?)))?;
        if from == library {
            return Ok(runtime);
        }
        Err(Error::precondition(format!(
            "this process has loaded {} from {} and cannot load {} as well",
            self.name,
            from.display(),
            library.display()
        ))
        .with_file(library)
        .with_hint(format!("use one {} in a process, or run the provider in a worker", self.name)))
    }

    /// The loaded runtime.
    ///
    /// # Errors
    /// `FailedPrecondition` before a successful [`load`](Loaded::load).
    pub fn get(&self) -> Result<&T> {
        self.runtime
            .get()
            .map(|(_, runtime)| runtime)
            .ok_or_else(|| Error::precondition(format!("{} is not loaded: `init` comes first", self.name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sdrun_abi::ErrorCode;

    #[test]
    fn loads_once_and_only_from_one_file() {
        let loaded: Loaded<u32> = Loaded::new("Runtime");
        let (here, there) = (Path::new("/a/lib.so"), Path::new("/b/lib.so"));
        assert_eq!(loaded.get().unwrap_err().code, ErrorCode::FailedPrecondition);
        let failed = loaded.load(here, |_| Err(Error::not_found("no such file")));
        assert_eq!(failed.unwrap_err().code, ErrorCode::NotFound);
        assert_eq!(loaded.load(here, |_| Ok(1)).unwrap(), &1, "a failed load may be tried again");
        assert_eq!(loaded.load(here, |_| Ok(2)).unwrap(), &1, "it is loaded once");
        let error = loaded.load(there, |_| Ok(3)).unwrap_err();
        assert_eq!(error.code, ErrorCode::FailedPrecondition);
        assert!(error.message.contains("/a/lib.so") && error.message.contains("/b/lib.so"), "{error}");
        assert_eq!(loaded.get().unwrap(), &1);
    }
}
