//! Pages of long answers.

use flextensord_proto::{kind::Failure, limit};

use crate::{service::failure::invalid_argument, weights::registry::WeightSet};

/// Tensors a page, and most that may be asked for.
pub(super) const TENSORS_A_PAGE: (usize, usize) = (500, 2000);
/// Sets a page, and most that may be asked for.
pub(super) const SETS_A_PAGE: (usize, usize) = (100, 1000);
/// Bytes of an answer's list, well under a message's limit.
pub(super) const PAGE_BYTES: usize = limit::MESSAGE_BYTES / 4 * 3;

pub(super) fn page_size(asked: u32, (usual, most): (usize, usize)) -> Result<usize, Failure> {
    match usize::try_from(asked).unwrap_or(usize::MAX) {
        0 => Ok(usual),
        size if size <= most => Ok(size),
        _ => {
            let rule = format!("0 to {most}");
            Err(invalid_argument("page_size", asked, &rule))
        }
    }
}

/// The first tensor of a page. A token names its set, so that pages of two sets that
/// had the same name one after the other never mix.
pub(super) fn tensor_page(set: &WeightSet, token: &str) -> Result<usize, Failure> {
    if token.is_empty() {
        return Ok(0);
    }
    token
        .split_once(':')
        .filter(|(id, _)| *id == set.id())
        .and_then(|(_, start)| start.parse().ok())
        .filter(|start| *start <= set.manifest().tensors().len())
        .ok_or_else(|| invalid_argument("page_token", token, "a token of an answer about this set"))
}

/// Name and owner of the last set of the page before.
pub(super) fn set_page(token: &str) -> Result<Option<(String, u32)>, Failure> {
    if token.is_empty() {
        return Ok(None);
    }
    token
        .rsplit_once('/')
        .and_then(|(name, owner)| Some(Some((name.to_owned(), owner.parse().ok()?))))
        .ok_or_else(|| invalid_argument("page_token", token, "a token of an answer"))
}
