//! Who calls, as the kernel vouches for it.

use flextensord_device::process::Peer;
use flextensord_proto::kind::{Failure, Kind, Origin};
use tonic::{Extensions, transport::server::UdsConnectInfo};

/// The process at the other end of the connection of a request.
///
/// # Errors
/// When the connection has no peer credentials.
pub fn peer(extensions: &Extensions) -> Result<Peer, Failure> {
    let credentials = extensions
        .get::<UdsConnectInfo>()
        .and_then(|info| info.peer_cred)
        .ok_or_else(|| {
            Failure::new(
                Kind::PermissionDenied,
                Origin::Client,
                "connection has no credentials",
            )
            .with("field", "peer")
            .with("value", "unknown")
            .with("rule", "a unix socket, whose peer the kernel vouches for")
        })?;
    Ok(Peer {
        uid: credentials.uid(),
        gid: credentials.gid(),
        pid: credentials
            .pid()
            .and_then(|pid| u32::try_from(pid).ok())
            .unwrap_or(0),
    })
}
