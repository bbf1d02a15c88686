//! What the process-level tests and the demo stand on: a daemon of the real binary in
//! directories of its own, client processes that compare every byte, models to load.
#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod daemon;
pub mod figures;
pub mod process;
pub mod reader;
pub mod supervisor;
pub mod tmpfs;
pub mod witness;

/// What goes wrong while a scene is set or played.
#[derive(Debug, thiserror::Error)]
pub enum SceneError {
    /// A file or process.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// A checkpoint that is none.
    #[error("checkpoint: {0}")]
    Checkpoint(String),
    /// The daemon or a client process did not do as expected.
    #[error("{0}")]
    Unexpected(String),
    /// A call was refused.
    #[error(transparent)]
    Client(#[from] flextensord_client::ClientError),
}

impl SceneError {
    /// A failed system call.
    pub fn io(what: impl Into<String>, source: std::io::Error) -> Self {
        Self::Io {
            what: what.into(),
            source,
        }
    }
}
