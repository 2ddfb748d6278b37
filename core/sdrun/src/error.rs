use sdrun_abi::{ErrorCode, Hint};
use sdrun_graph::GraphError;
use std::path::Path;

/// An error of the library: what, where and why in one sentence (`Display`), and what to do about it
/// ([`hint`](Error::hint)).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A provider, or the vendor's runtime behind it, refused or failed.
    #[error("{provider}: {error}")]
    Provider {
        /// Id of the provider.
        provider: String,
        /// The provider's error.
        error: sdrun_abi::Error,
    },
    /// The model cannot be read or interpreted.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// Everything else: files, arguments, the registry, the cache.
    #[error(transparent)]
    Core(#[from] sdrun_abi::Error),
}

/// The native code of the error about a process that SIGKILL ended.
pub(crate) const KILLED: &str = "SIGKILL";

/// Result of the library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Kind of failure.
    pub fn code(&self) -> ErrorCode {
        match self {
            Error::Provider { error, .. } | Error::Core(error) => error.code,
            Error::Graph(e) => match e {
                GraphError::Io(error) => error.code,
                GraphError::MissingData { .. } => ErrorCode::NotFound,
                GraphError::Malformed { .. } => ErrorCode::DataLoss,
                GraphError::Unsupported { .. } | GraphError::UnsupportedModel { .. } => {
                    ErrorCode::Unimplemented
                }
                GraphError::ExternalData { .. } | GraphError::Invalid(_) => ErrorCode::InvalidArgument,
            },
        }
    }

    /// What to do about it, if anything.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            Error::Provider { error, .. } | Error::Core(error) => error.hint.clone(),
            Error::Graph(GraphError::Io(error)) if error.code == ErrorCode::NotFound => Some(Hint::GiveModel),
            Error::Graph(GraphError::Io(error)) => error.hint.clone(),
            Error::Graph(_) => None,
        }
    }

    /// Whether memory ran out. Linux then kills a process, so a killed process counts too.
    pub(crate) fn is_out_of_memory(&self) -> bool {
        let killed = match self {
            Error::Provider { error, .. } | Error::Core(error) => {
                error.native_code.as_deref() == Some(KILLED)
            }
            Error::Graph(_) => false,
        };
        killed || self.code() == ErrorCode::ResourceExhausted
    }

    /// Converts errors of provider `id` to library errors.
    pub(crate) fn of(id: &str) -> impl Fn(sdrun_abi::Error) -> Error + '_ {
        move |error| Error::Provider { provider: id.to_string(), error }
    }
    pub(crate) fn io(doing: &str, file: impl AsRef<Path>, error: &std::io::Error) -> Self {
        Error::Core(sdrun_abi::Error::io(doing, file, error))
    }
}
