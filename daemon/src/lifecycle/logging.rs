//! What the daemon writes to its standard error.

use std::io::{self, IsTerminal as _};

use tracing::{Span, Subscriber};
use tracing_subscriber::{EnvFilter, fmt::MakeWriter};

use super::instance::StartError;
use crate::configuration::{LogFormat, Settings};

/// Logs to standard error from now on.
///
/// # Errors
/// When the process logs already.
pub fn init(settings: &Settings) -> Result<(), StartError> {
    let colours = io::stderr().is_terminal();
    let subscriber = subscriber(&settings.log, settings.log_format, colours, io::stderr);
    tracing::subscriber::set_global_default(subscriber)
        .map_err(|error| StartError::setup("start logging", error))
}

/// A span for one request: every event within carries its id and call. An empty id is
/// left out.
#[must_use]
pub fn request_span(call: &str, request_id: &str) -> Span {
    let span = tracing::info_span!("request", call, request_id = tracing::field::Empty);
    if !request_id.is_empty() {
        span.record("request_id", request_id);
    }
    span
}

fn subscriber<W>(
    filter: &str,
    format: LogFormat,
    colours: bool,
    writer: W,
) -> Box<dyn Subscriber + Send + Sync>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let common = tracing_subscriber::fmt()
        // settings hold a filter that was parsed already; what breaks later is left out
        .with_env_filter(EnvFilter::new(filter))
        .with_writer(writer)
        .with_ansi(colours);
    match format {
        LogFormat::Human => Box::new(common.finish()),
        // one flat object a line; the request's fields stand under "span"
        LogFormat::Json => Box::new(
            common
                .json()
                .flatten_event(true)
                .with_current_span(true)
                .with_span_list(false)
                .finish(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(format: LogFormat, filter: &str) -> String {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = subscriber(filter, format, false, move || writer.clone());
        tracing::subscriber::with_default(subscriber, || {
            let _span = request_span("OpenManager", "r-1").entered();
            tracing::info!(bytes = 7, "opened");
            tracing::debug!("detail");
        });
        let text = lines.0.lock().unwrap().clone();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn a_json_line_carries_the_request() {
        let text = logged(LogFormat::Json, "info");
        assert_eq!(text.lines().count(), 1, "{text}");
        let line: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(line["message"], "opened");
        assert_eq!(line["bytes"], 7);
        assert_eq!(line["span"]["request_id"], "r-1");
        assert_eq!(line["span"]["call"], "OpenManager");
    }

    #[test]
    fn a_human_line_carries_the_request_and_the_filter_holds() {
        let text = logged(LogFormat::Human, "info");
        assert!(
            text.contains("request_id=\"r-1\"") && text.contains("opened"),
            "{text}"
        );
        assert!(!text.contains("detail"));
        assert!(logged(LogFormat::Human, "debug").contains("detail"));
    }
}
