//! The daemon's binary; everything it does stands in the library.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    flextensord::cli::run(std::env::args_os()).into()
}
