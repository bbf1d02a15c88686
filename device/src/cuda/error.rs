//! What the CUDA driver says when it refuses, by number and name. The driver itself is
//! never asked for the text: a driver that fails may fail at that too.

use super::code;

/// Why a GPU cannot be used, or a call of the driver failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The driver's library cannot be loaded.
    #[error("no CUDA driver: {tried}")]
    NoDriver {
        /// What was tried, and what came of it.
        tried: String,
    },
    /// The driver is too old, or is none.
    #[error("the CUDA driver has no {}, which flextensord needs", symbols.join(", "))]
    MissingSymbol {
        /// The calls.
        symbols: Vec<&'static str>,
    },
    /// A call failed.
    #[error("{call} failed: {} ({code})", code::name(*.code))]
    Call {
        /// The driver's call.
        call: &'static str,
        /// `CUresult`.
        code: u32,
    },
    /// A GPU lacks something that the data plane rests on.
    #[error("GPU {gpu} has no {what}")]
    Unfit {
        /// Its name and UUID.
        gpu: String,
        /// What it lacks.
        what: &'static str,
    },
    /// There is no such GPU in this process.
    #[error("no GPU {wanted}; this process sees {seen}")]
    NoGpu {
        /// What was asked for.
        wanted: String,
        /// UUIDs and names of those that there are.
        seen: String,
    },
    /// Two names stand for one GPU.
    #[error("{first} and {second} name the same GPU, {gpu}: name it once")]
    Twice {
        /// The name that came first.
        first: String,
        /// The other one.
        second: String,
        /// The GPU's number and UUID.
        gpu: String,
    },
    /// The calling sequence does not allow it.
    #[error("{0}")]
    State(&'static str),
}

impl CudaError {
    /// The driver's number, where it was the driver who refused.
    #[must_use]
    pub fn code(&self) -> Option<u32> {
        match self {
            Self::Call { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Whether the context is unusable from here on: only a new process helps.
    #[must_use]
    pub fn is_sticky(&self) -> bool {
        self.code().is_some_and(code::is_sticky)
    }

    /// Whether host memory is not pinned for a reason of the host's memory and limits.
    #[must_use]
    pub fn refuses_pinning(&self) -> bool {
        self.code().is_some_and(code::refuses_pinning)
    }

    /// The driver's call, where it was the driver who refused.
    #[must_use]
    pub fn operation(&self) -> Option<&'static str> {
        match self {
            Self::Call { call, .. } => Some(call),
            _ => None,
        }
    }

    /// Whether there was too little memory, which may be otherwise later.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.code() == Some(code::OUT_OF_MEMORY)
    }
}
