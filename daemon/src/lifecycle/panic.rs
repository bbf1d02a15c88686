//! A panic anywhere is a mistake of the daemon: it is logged, health turns, the process
//! ends.

use std::{backtrace::Backtrace, panic, time::Duration};

use tokio::sync::watch;

use super::exit::Exit;

/// How long the rest of the daemon has to turn health to NOT_SERVING before the end.
const NOTICE: Duration = Duration::from_millis(100);

/// From now on a panic is logged, told to the returned watch, and ends the process with
/// status 70. Memory of weights and devices is not unwound: a successor adopts it.
#[must_use]
pub fn install_hook() -> watch::Receiver<bool> {
    let (panicked, watch) = watch::channel(false);
    panic::set_hook(Box::new(move |info| {
        let place = info.location().map(ToString::to_string);
        let message = info.payload_as_str().unwrap_or("no message");
        tracing::error!(
            place = place.as_deref().unwrap_or("unknown"),
            backtrace = %Backtrace::capture(),
            "panic: {message}"
        );
        // nobody may be watching any more
        let _: Result<(), watch::error::SendError<bool>> = panicked.send(true);
        std::thread::sleep(NOTICE);
        std::process::exit(i32::from(Exit::Internal.code()));
    }));
    watch
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const CHILD: &str = "PANIC_TEST_CHILD";

    #[test]
    fn a_panic_is_told_and_ends_the_process_with_70() {
        if std::env::var_os(CHILD).is_some() {
            let mut watch = install_hook();
            std::thread::spawn(move || panic!("planted"));
            // told before the end
            let told = tokio::runtime::Builder::new_current_thread()
                .build()
                .unwrap()
                .block_on(async move { watch.wait_for(|told| *told).await.map(|told| *told) });
            println!("told {}", told.unwrap());
            std::thread::sleep(Duration::from_secs(60));
            return;
        }
        let name = "lifecycle::panic::tests::a_panic_is_told_and_ends_the_process_with_70";
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(70));
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("told true"), "{text}");
    }
}
