//! How many descriptors the process may have open.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises the limit to the most that the process may give itself: each connection, ticket,
/// segment and allocation is a descriptor. Returns the limit that holds then.
pub fn raise() -> u64 {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
        return 0;
    };
    match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
        Ok(()) => hard,
        Err(error) => {
            tracing::warn!(%error, soft, hard, "limit of open descriptors stays as it is");
            soft
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_as_high_as_it_may_be() {
        let raised = raise();
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert_eq!((soft, raised), (hard, hard));
    }
}
