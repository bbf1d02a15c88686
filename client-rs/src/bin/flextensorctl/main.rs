//! The operator's tool: one line to the daemon and back.
#![forbid(unsafe_code)]

mod drain;
mod dump;
mod exit;
mod layers;
mod load;
mod managers;
mod output;
mod plan;
mod status;
mod terminate;
mod weights;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::{Args, Parser, Subcommand};
use flextensord_client::{Address, ConnectOptions, blocking::Client};

use crate::{exit::Failed, output::Output};

/// Looks at a flextensord daemon and tells it what to do.
#[derive(Debug, Parser)]
#[command(name = "flextensorctl", version, after_help = exit::HELP)]
struct Command {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Args)]
struct Common {
    /// Directory that holds the instances' sockets [default: $FLEXTENSORD_RUNTIME_DIR,
    /// else /run/flextensord as root, else $XDG_RUNTIME_DIR/flextensord]
    #[arg(long, global = true, value_name = "DIR")]
    runtime_dir: Option<PathBuf>,
    /// Which daemon of this machine [default: $FLEXTENSORD_INSTANCE, else "default"]
    #[arg(long, global = true, value_name = "NAME")]
    instance: Option<String>,
    /// Path of flextensord.sock [default: $FLEXTENSORD_SOCKET]
    #[arg(long, global = true, value_name = "PATH", conflicts_with_all = ["runtime_dir", "instance"])]
    socket: Option<PathBuf>,
    /// Print JSON instead of a table
    #[arg(long, global = true)]
    json: bool,
    /// How long a call may take
    #[arg(long, global = true, value_name = "DURATION", value_parser = call_timeout, default_value = "30s")]
    timeout: Duration,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Show the daemon, its devices, managers and weight sets
    Status,
    /// List the managers: owner, phase, memory, what they wait for
    Managers,
    /// List the weight sets: bytes, digest, who is attached
    Weights,
    /// List the layers of a manager
    Layers {
        /// The manager
        name: String,
    },
    /// Load a checkpoint as a weight set
    Load(load::Arguments),
    /// Remove a weight set that nobody is attached to
    Drop {
        /// The weight set
        name: String,
    },
    /// Plan a described model, without a daemon: what stays, what streams, how long a step is
    Plan(plan::Arguments),
    /// Print all that the daemon knows, as JSON
    Dump {
        /// Only this manager
        name: Option<String>,
    },
    /// End a manager at once; its memory returns when its process is gone
    Terminate {
        /// The manager
        name: String,
        /// The user that owns it; another's needs root or the daemon's user
        #[arg(long)]
        uid: Option<u32>,
    },
    /// Let managers end, take nothing new, then stop the daemon
    Drain {
        /// How long managers may go on [default: as the daemon is configured]
        #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
        deadline: Option<Duration>,
    },
}

fn main() -> ExitCode {
    let command = match Command::try_parse() {
        Ok(command) => command,
        Err(error) => return exit::usage(&error),
    };
    match run(command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failed) => failed.report(),
    }
}

fn run(Command { common, verb }: Command) -> Result<(), Failed> {
    let output = Output::new(common.json);
    if let Verb::Plan(arguments) = &verb {
        return plan::show(&output, arguments);
    }
    let options = ConnectOptions {
        address: Address {
            socket: common.socket,
            runtime_dir: common.runtime_dir,
            instance: common.instance,
        },
        call_timeout: common.timeout,
        ..ConnectOptions::default()
    };
    let client = Client::connect(options)?;
    match verb {
        Verb::Status => status::show(&client, &output),
        Verb::Managers => managers::list(&client, &output),
        Verb::Weights => weights::list(&client, &output),
        Verb::Layers { name } => layers::list(&client, &output, &name),
        Verb::Load(arguments) => load::load(&client, &output, &arguments),
        // needs no daemon
        Verb::Plan(arguments) => plan::show(&output, &arguments),
        Verb::Drop { name } => weights::drop(&client, &output, &name),
        Verb::Dump { name } => dump::print(&client, &output, name.as_deref()),
        Verb::Terminate { name, uid } => terminate::terminate(&client, &output, &name, uid),
        Verb::Drain { deadline } => drain::drain(&client, &output, deadline),
    }
}

/// A limit for calls that no clock overflows at.
fn call_timeout(text: &str) -> Result<Duration, String> {
    let limit = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if (Duration::from_millis(1)..=Duration::from_secs(24 * 3600)).contains(&limit) {
        Ok(limit)
    } else {
        Err("must be 1ms to 24h".to_owned())
    }
}
