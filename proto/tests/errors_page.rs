//! The page of error kinds is generated from the catalogue.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::{fmt::Write as _, fs, path::Path};

use flextensord_proto::kind::Kind;

#[test]
fn the_page_of_error_kinds_says_what_the_catalogue_says() {
    let mut page = String::from(
        "# Errors\n\n\
         Every refusal is a gRPC status with a `google.rpc.ErrorInfo` of the domain `flextensord`: its reason is the\n\
         kind, its metadata are `origin` (client, daemon, driver, kernel), `retryable` (true, false) and the figures\n\
         of the case, such as `wanted`, `available`, `limit`, `remedy`, or `field`, `value`, `rule`. On the descriptor\n\
         channel the kind comes in `Refused`.\n\n\
         This page is made from `proto/src/kind.rs` by `UPDATE_PAGES=1 cargo test -p flextensord-proto`.\n\n\
         | kind | gRPC code | retry | what it means |\n|---|---|---|---|\n",
    );
    for kind in Kind::ALL {
        let retry = if kind.retryable() { "may help" } else { "no" };
        let (code, meaning) = (kind.code(), kind.meaning().trim());
        writeln!(page, "| `{kind}` | {code:?} | {retry} | {meaning} |").unwrap();
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/errors.md");
    if std::env::var_os("UPDATE_PAGES").is_some() {
        fs::write(&path, &page).unwrap();
    }
    assert_eq!(
        fs::read_to_string(&path).unwrap(),
        page,
        "docs/errors.md is out of date"
    );
}
