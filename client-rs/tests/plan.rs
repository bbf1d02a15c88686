//! `flextensorctl plan`, through the binary: no daemon runs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::{
    fs,
    path::PathBuf,
    process::{Command, Output},
};

use serde_json::Value;

/// The example of docs/planner.md.
fn example() -> PathBuf {
    PathBuf::from(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../docs/llama-8b.json"
    ))
}

fn ctl(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_flextensorctl"))
        .args(["--runtime-dir", "/nonexistent"])
        .args(arguments)
        .output()
        .unwrap()
}

fn planned(more: &[&str]) -> Output {
    let file = example();
    let mut arguments = vec!["plan", "--file", file.to_str().unwrap()];
    arguments.extend(more);
    let output = ctl(&arguments);
    assert!(output.status.success(), "{more:?}: {output:?}");
    output
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn the_example_is_planned_as_table_and_as_json() {
    let table = text(&planned(&["--budget", "60%"]));
    for expected in [
        "llama-8b within 7.8 GiB",
        "BUDGET BOUND",
        "budget_fill",
        "layers.31",
    ] {
        assert!(table.contains(expected), "{table}");
    }
    let document: Value =
        serde_json::from_slice(&planned(&["--budget", "60%", "--json"]).stdout).unwrap();
    assert_eq!(document["mode"], "memory");
    assert_eq!(document["budget_bytes"], 8_371_200_000_u64);
    assert_eq!(document["weight_bytes"], 13_952_000_000_u64);
    let forecast = &document["forecast"];
    assert!(forecast["step_s"].as_f64().unwrap() <= 107.0e-3);
    assert!((forecast["budget_bound_s"].as_f64().unwrap() - 101.28e-3).abs() < 1e-4);
    let parts = document["parts"].as_array().unwrap();
    assert_eq!(parts.len(), 7 * 32);
    assert_eq!(parts[4]["name"], "layers.0.gate");
    let transfers = forecast["keys"][0]["transfers"].as_array().unwrap();
    assert_eq!(
        transfers.len(),
        document["stream_order"].as_array().unwrap().len()
    );
    assert!(
        transfers
            .iter()
            .any(|transfer| transfer["wait_s"].as_f64().unwrap() > 0.0)
    );
}

#[test]
fn a_device_too_small_to_hide_all_copies_is_said() {
    let without = text(&planned(&[]));
    assert!(
        without.contains("no plan within 7.5 GiB hides all copies"),
        "{without}"
    );
    let document: Value =
        serde_json::from_slice(&planned(&["--fraction", "0.5", "--json"]).stdout).unwrap();
    assert_eq!(document["budget_bytes"], 4_000_000_000_u64);
}

#[test]
fn strategies_and_layouts_are_chosen_by_name() {
    for strategy in [
        "adaptive",
        "streaming",
        "budget_fill",
        "knapsack",
        "greedy",
        "nth_layer",
    ] {
        planned(&["--budget", "60%", "--strategy", strategy]);
    }
    let blocks = planned(&[
        "--budget",
        "60%",
        "--layout",
        "allocation_block_transfer",
        "--num-blocks",
        "3",
        "--json",
    ]);
    let document: Value = serde_json::from_slice(&blocks.stdout).unwrap();
    assert_eq!(
        document["layout"]["allocation_block_transfer"]["num_blocks"],
        3
    );
}

#[test]
fn a_pass_is_drawn() {
    let svg = text(&planned(&["--budget", "60%", "--svg"]));
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
    for expected in [
        "compute",
        "waits",
        "copies",
        "layers.0.gate",
        "budget bound 101.28",
    ] {
        assert!(svg.contains(expected), "no {expected}");
    }
    assert_eq!(
        svg.matches("<rect").count(),
        svg.matches("</rect>").count() + 1
    );
}

#[test]
fn exit_codes_tell_a_bad_command_line_from_a_bad_file_from_a_small_budget() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = directory.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let example = example().to_str().unwrap().to_owned();
    let layers = r#""layers": [{"name": "l", "compute_ms": -1, "parts": []}]"#;
    for (arguments, code, said) in [
        (
            vec!["--file", "/nonexistent/model.json"],
            64,
            "No such file",
        ),
        (vec!["--file", &example, "--budget", "much"], 64, "60%"),
        (vec!["--file", &example, "--fraction", "2"], 64, "up to 1"),
        (
            vec!["--file", &example, "--strategy", "luck"],
            64,
            "budget_fill",
        ),
        (vec!["--file", &file("a", "{")], 78, "line 1"),
        (
            vec!["--file", &file("b", r#"{"layers": [], "layer": 1}"#)],
            78,
            "unknown field",
        ),
        (
            vec!["--file", &file("c", &format!("{{{layers}}}"))],
            78,
            "0 to 10000 seconds",
        ),
        (
            vec![
                "--file",
                &file("d", r#"{"layers": []}"#),
                "--fraction",
                "0.5",
            ],
            78,
            "device_bytes",
        ),
        (
            vec!["--file", &example, "--budget", "1MiB"],
            1,
            "least feasible one is 117400320",
        ),
    ] {
        let output = ctl(&[&["plan"], &arguments[..]].concat());
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {errors}");
        assert!(errors.contains(said), "{arguments:?}: {errors}");
    }
}
