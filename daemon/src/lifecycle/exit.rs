//! How the process ends, after sysexits.h.

use std::process::ExitCode;

/// An exit status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// All went well.
    Ok = 0,
    /// The command line is wrong.
    Usage = 64,
    /// Something that is needed is not there: for `doctor`, a check has failed.
    Unavailable = 69,
    /// A mistake of the daemon itself, or of the machine.
    Internal = 70,
    /// The instance is served by another daemon.
    InstanceExists = 73,
    /// It may work later.
    TryAgain = 75,
    /// The rights do not allow it.
    NotAllowed = 77,
    /// The configuration, or what it names, is wrong: a restart cannot help.
    Configuration = 78,
}

impl Exit {
    /// The status itself.
    #[must_use]
    pub fn code(self) -> u8 {
        self as u8
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}
