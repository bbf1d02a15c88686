//! What a client hands back of a daemon before this one, and its manager taken up with it.

use std::{os::fd::OwnedFd, sync::Arc};

use flextensord_device::process::Peer;
use flextensord_proto::{
    kind::Failure,
    v1::{self, handed_back::What},
};

use super::{
    offload::OffloadService,
    request::{self, field},
};
use crate::managers::{adoption::HandedBack, lease::OpenLease, registry::OpenRequest};

impl OffloadService {
    /// Redeems the tickets of what a client hands back.
    pub(super) fn handed_back(
        &self,
        peer: Peer,
        descriptors: Vec<v1::HandedBack>,
        holds: Vec<v1::KeptHold>,
        is_nothing: bool,
    ) -> Result<HandedBack, Failure> {
        let mut handed = HandedBack {
            is_nothing,
            holds: holds
                .into_iter()
                .map(|kept| (kept.hold, kept.parts))
                .collect(),
            ..HandedBack::default()
        };
        for descriptor in descriptors {
            let descriptor_of = |ticket: &[u8]| -> Result<OwnedFd, Failure> {
                Ok(self.tickets.collect(peer, ticket)?.file.into())
            };
            let given = descriptor_of(&descriptor.ticket)?;
            match descriptor.what {
                Some(What::ControlOfPlan(version)) => handed.controls.insert(version, given),
                Some(What::Allocation(id)) => handed.memory.insert(id, given),
                None => {
                    let rule = "a page of slot words or an allocation";
                    return Err(field("handed_back.what", "missing", rule));
                }
            };
        }
        Ok(handed)
    }

    /// Takes up a manager of a dead daemon.
    pub(super) async fn adopt(
        &self,
        peer: Peer,
        token: Vec<u8>,
        open: &OpenRequest,
        handed: HandedBack,
    ) -> Result<OpenLease, Failure> {
        let managers = Arc::clone(&self.managers);
        let (open_id, client) = (open.request_id.clone(), open.client.clone());
        // on a thread that may block: the driver takes its time
        let work = move || managers.adopt(peer, &token, &open_id, &client, handed);
        let manager = tokio::task::spawn_blocking(work)
            .await
            .map_err(|_| request::worker())??;
        Ok(self.managers.lease(manager))
    }
}
