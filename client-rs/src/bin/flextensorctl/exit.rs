//! Exit codes, and how errors are shown.

use std::{io::Write as _, process::ExitCode};

use flextensord_client::{ClientError, kind::Kind};

/// For the end of `--help`.
pub(crate) const HELP: &str = "Exit codes: 0 done, 1 refused, 64 usage, 69 daemon not reachable, \
70 internal, 75 try again, 77 not allowed, 78 configuration";

const REFUSED: u8 = 1;
const USAGE: u8 = 64;
const UNAVAILABLE: u8 = 69;
const INTERNAL: u8 = 70;
const TRY_AGAIN: u8 = 75;
const NOT_ALLOWED: u8 = 77;
const CONFIGURATION: u8 = 78;

/// Why a command failed.
#[derive(Debug)]
pub(crate) enum Failed {
    /// The client's error.
    Client(Box<ClientError>),
    /// Nobody can read what we print.
    Output(std::io::Error),
    /// The daemon did not come to an end in time.
    Unfinished(String),
    /// The daemon's answer cannot be read.
    Answer(String),
    /// The command line names what cannot be read, or cannot be.
    Usage(String),
    /// The description of a model is wrong.
    Description(String),
    /// There is no plan within the budget.
    Infeasible(String),
}

impl From<ClientError> for Failed {
    fn from(error: ClientError) -> Self {
        Self::Client(Box::new(error))
    }
}

impl From<std::io::Error> for Failed {
    fn from(error: std::io::Error) -> Self {
        Self::Output(error)
    }
}

impl Failed {
    /// Prints one line, and a remedy if there is one.
    pub(crate) fn report(&self) -> ExitCode {
        let mut line = match self {
            Self::Client(error) => one_line(&error.to_string()),
            // who reads us has read enough
            Self::Output(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
                return ExitCode::SUCCESS;
            }
            Self::Output(error) => format!("write the output: {error}"),
            Self::Unfinished(text)
            | Self::Answer(text)
            | Self::Usage(text)
            | Self::Description(text)
            | Self::Infeasible(text) => one_line(text),
        };
        if let Self::Client(error) = self
            && let Some(remedy) = error.remedy()
        {
            line = format!("{line}; remedy: {}", one_line(remedy));
        }
        let _ = writeln!(std::io::stderr(), "flextensorctl: {line}");
        ExitCode::from(self.code())
    }

    fn code(&self) -> u8 {
        match self {
            Self::Client(error) => code_of(error),
            Self::Output(_) | Self::Answer(_) => INTERNAL,
            Self::Unfinished(_) => TRY_AGAIN,
            Self::Usage(_) => USAGE,
            Self::Description(_) => CONFIGURATION,
            Self::Infeasible(_) => REFUSED,
        }
    }
}

fn code_of(error: &ClientError) -> u8 {
    match error {
        ClientError::Refused(failure) => match failure.kind {
            Kind::PermissionDenied => NOT_ALLOWED,
            Kind::Internal | Kind::Kernel | Kind::Device => INTERNAL,
            _ if failure.retryable => TRY_AGAIN,
            _ => REFUSED,
        },
        ClientError::Unreachable { remedy, .. } if remedy.contains("its group") => NOT_ALLOWED,
        ClientError::Unreachable { .. } | ClientError::DaemonLost { .. } => UNAVAILABLE,
        ClientError::Transport { .. } | ClientError::Channel { .. } => UNAVAILABLE,
        ClientError::Deadline { .. } => TRY_AGAIN,
        ClientError::Locate(_) => CONFIGURATION,
        ClientError::Checkpoint(_) => REFUSED,
        _ => INTERNAL,
    }
}

/// What clap says about a command line: help goes to stdout and is no error.
pub(crate) fn usage(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    if error.use_stderr() {
        ExitCode::from(USAGE)
    } else {
        ExitCode::SUCCESS
    }
}

fn one_line(text: &str) -> String {
    text.split(['\n', '\r'])
        .map(str::trim)
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use flextensord_client::kind::{Failure, Origin};

    use super::*;

    #[test]
    fn codes_say_whether_to_try_again_ask_for_rights_or_start_the_daemon() {
        let refused = |kind| ClientError::Refused(Failure::new(kind, Origin::Daemon, "no"));
        for (kind, code) in [
            (Kind::PermissionDenied, 77),
            (Kind::Internal, 70),
            (Kind::Draining, 75),
            (Kind::HostMemory, 75),
            (Kind::NotFound, 1),
            (Kind::ContentDiffers, 1),
        ] {
            assert_eq!(code_of(&refused(kind)), code, "{kind}");
        }
        let slow = ClientError::Deadline {
            what: "Get".to_owned(),
            limit: Duration::from_secs(1),
        };
        assert_eq!(code_of(&slow), 75);
    }

    #[test]
    fn an_error_is_one_line() {
        assert_eq!(one_line("a\nb\r\nc"), "a b  c");
    }
}
