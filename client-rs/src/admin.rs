//! What an operator asks of the daemon.

use std::time::Duration;

use flextensord_proto::v1::{
    DrainRequest, DumpRecord, DumpRequest, StatusRequest, StatusResponse, TerminateManagerRequest,
    admin_client::AdminClient,
};

use crate::{
    connection::{Client, request},
    error::ClientError,
    request_id,
};

/// Calls about the daemon, from [`Client::admin`].
#[derive(Debug, Clone, Copy)]
pub struct Admin<'a> {
    client: &'a Client,
}

impl Client {
    /// Calls about the daemon.
    #[must_use]
    pub fn admin(&self) -> Admin<'_> {
        Admin { client: self }
    }
}

impl Admin<'_> {
    /// What the daemon does now, as far as the caller may see it.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn status(&self) -> Result<StatusResponse, ClientError> {
        let limit = self.client.options().call_timeout;
        let answer = self.client.call("Status", limit, |channel| async move {
            let message = request(StatusRequest {}, limit);
            Ok(AdminClient::new(channel)
                .status(message)
                .await?
                .into_inner())
        });
        answer.await
    }

    /// The records of everything, or of `manager` alone.
    ///
    /// # Errors
    /// `NOT_FOUND` when there is no such manager that the caller may see.
    pub async fn dump(&self, manager: Option<&str>) -> Result<Vec<DumpRecord>, ClientError> {
        let limit = self.client.options().call_timeout;
        let message = DumpRequest {
            manager: manager.unwrap_or_default().to_owned(),
        };
        let answer = self.client.call("Dump", limit, |channel| {
            let message = request(message.clone(), limit);
            async move {
                let mut stream = AdminClient::new(channel).dump(message).await?.into_inner();
                let mut records = Vec::new();
                while let Some(record) = stream.message().await? {
                    records.push(record);
                }
                Ok(records)
            }
        });
        answer.await
    }

    /// Ends the manager `name` at once, the caller's own or that of the user `uid`.
    /// Returns the bytes that come back when its owner's process is gone.
    ///
    /// # Errors
    /// `NOT_FOUND`, `PERMISSION_DENIED`.
    pub async fn terminate(&self, name: &str, uid: Option<u32>) -> Result<u64, ClientError> {
        let limit = self.client.options().call_timeout;
        let message = TerminateManagerRequest {
            request_id: request_id::fresh()?,
            name: name.to_owned(),
            uid,
        };
        let answer = self.client.call("TerminateManager", limit, |channel| {
            let message = request(message.clone(), limit);
            async move {
                let answer = AdminClient::new(channel).terminate_manager(message).await?;
                Ok(answer.into_inner())
            }
        });
        Ok(answer.await?.held_bytes)
    }

    /// Refuses new managers and weights from now on, and stops the daemon when the
    /// others have ended, at the latest after `deadline` (`None`: as configured).
    /// Returns at once, with the number of managers that go on.
    ///
    /// # Errors
    /// `PERMISSION_DENIED` unless the caller is root or the daemon's user.
    pub async fn drain(&self, deadline: Option<Duration>) -> Result<u32, ClientError> {
        let limit = self.client.options().call_timeout;
        let milliseconds = deadline.map_or(0, |deadline| deadline.as_millis().max(1));
        let message = DrainRequest {
            request_id: request_id::fresh()?,
            deadline_ms: u64::try_from(milliseconds).unwrap_or(u64::MAX),
        };
        let answer = self.client.call("Drain", limit, |channel| {
            let message = request(message.clone(), limit);
            async move { Ok(AdminClient::new(channel).drain(message).await?.into_inner()) }
        });
        Ok(answer.await?.managers)
    }
}
