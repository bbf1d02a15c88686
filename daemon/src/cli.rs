//! The command line of the daemon: what was asked for, done, and how it ended.

use std::{ffi::OsString, io::Write as _};

use clap::{Args, Parser, Subcommand, error::ErrorKind};
use flextensord_device::failpoint;

use crate::{
    configuration::{self, ConfigurationError, Flags, Key, Settings, Sources, show},
    doctor,
    lifecycle::{Exit, devices::Drivers, logging, reap, serve},
};

/// What each exit status means; part of the help.
const STATUSES: &str = "\
Exit status:
  0   done, or stopped when told to
  64  the command line is wrong
  69  a check of doctor has failed, or the device cannot be used
  70  internal error
  73  the instance is served by another daemon
  75  try again
  77  not allowed
  78  the configuration is wrong";

/// A build that can be made to fail says so.
const VERSION: &str = if failpoint::COMPILED_IN {
    concat!(env!("CARGO_PKG_VERSION"), " (failpoints)")
} else {
    env!("CARGO_PKG_VERSION")
};

/// A daemon that owns the weights of large models on a node.
#[derive(Debug, Parser)]
#[command(name = "flextensord", version = VERSION, after_help = STATUSES)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the daemon in the foreground; SIGTERM or SIGINT ends it
    Serve(Flags),
    /// Print the effective configuration and where each value came from
    CheckConfig(Shown),
    /// Remove what a daemon kept for a successor that is not to come
    Reap(Shown),
    /// Look for what on this machine stands in the way, and say what to change
    Doctor(Shown),
}

#[derive(Debug, Args)]
struct Shown {
    #[command(flatten)]
    flags: Flags,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Does what `arguments`, the program's name first, ask for.
pub fn run(arguments: impl Iterator<Item = OsString>) -> Exit {
    run_with(arguments, &Drivers::of_machine())
}

/// As [`run`], with CUDA drivers from elsewhere.
pub fn run_with(arguments: impl Iterator<Item = OsString>, drivers: &Drivers) -> Exit {
    match CommandLine::try_parse_from(arguments) {
        Ok(CommandLine { command }) => match command {
            Command::Serve(flags) => daemon(&flags, drivers),
            Command::CheckConfig(shown) => check_config(&shown),
            Command::Reap(shown) => reap(&shown),
            Command::Doctor(shown) => examine(&shown, drivers),
        },
        Err(error) => {
            // help and version are for the standard output, mistakes for the other
            let _: std::io::Result<()> = error.print();
            match error.kind() {
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Exit::Ok,
                _ => Exit::Usage,
            }
        }
    }
}

fn daemon(flags: &Flags, drivers: &Drivers) -> Exit {
    let settings = match configuration::load(&Sources::of_process(flags)) {
        Ok(settings) => settings,
        Err(error) => return refuse(&error),
    };
    if let Err(error) = logging::init(&settings) {
        complain(&error);
        return error.exit();
    }
    serve::run(&settings, drivers)
}

fn check_config(shown: &Shown) -> Exit {
    match configuration::load(&Sources::of_process(&shown.flags)) {
        Ok(settings) if shown.json => print(&format!("{:#}\n", show::json(&settings))),
        Ok(settings) => print(&show::text(&settings)),
        Err(error) => refuse(&error),
    }
}

fn examine(shown: &Shown, drivers: &Drivers) -> Exit {
    // the machine can be judged before anybody has chosen a device
    let sources = Sources::of_process(&shown.flags);
    let settings = configuration::collect(&sources).and_then(|mut layer| {
        layer.assume(Key::Device, "cpu");
        Settings::new(&layer, &sources)
    });
    let settings = match settings {
        Ok(settings) => settings,
        Err(error) => return refuse(&error),
    };
    let report = doctor::examine(&doctor::Machine::new(&settings, drivers));
    let text = if shown.json {
        format!("{:#}\n", report.json())
    } else {
        report.text()
    };
    match print(&text) {
        Exit::Ok => report.exit(),
        other => other,
    }
}

fn reap(shown: &Shown) -> Exit {
    // what is left is the same on every device
    let sources = Sources::of_process(&shown.flags);
    let settings = configuration::collect(&sources).and_then(|mut layer| {
        layer.assume(Key::Device, "cpu");
        Settings::new(&layer, &sources)
    });
    let settings = match settings {
        Ok(settings) => settings,
        Err(error) => return refuse(&error),
    };
    match reap::reap(&settings) {
        Ok(reaped) if shown.json => print(&format!(
            "{:#}\n",
            serde_json::json!({ "segments": reaped.segments, "managers": reaped.managers })
        )),
        Ok(reaped) => print(&format!(
            "removed {} segments and {} managers\n",
            reaped.segments, reaped.managers
        )),
        Err(error) => {
            complain(&error);
            error.exit()
        }
    }
}

fn refuse(error: &ConfigurationError) -> Exit {
    complain(error);
    Exit::Configuration
}

fn complain(error: &dyn std::error::Error) {
    // whoever closed the standard error does not want to know
    let _: std::io::Result<()> = writeln!(std::io::stderr(), "flextensord: {error}");
}

fn print(text: &str) -> Exit {
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => Exit::Ok,
        Err(error) => {
            complain(&error);
            Exit::Internal
        }
    }
}
