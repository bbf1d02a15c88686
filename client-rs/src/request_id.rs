//! Ids that make a repeated call the same call.

use crate::error::ClientError;

/// A fresh id: 16 random bytes as hex, so that ids of all clients never meet.
pub(crate) fn fresh() -> Result<String, ClientError> {
    let mut bytes = [0u8; 16];
    getrandom::fill(&mut bytes).map_err(|error| ClientError::Protocol {
        call: "request id",
        reason: format!("the kernel gives no random bytes: {error}"),
    })?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use flextensord_proto::limit::REQUEST_ID_BYTES;

    #[test]
    fn ids_are_long_enough_and_never_repeat() {
        let (one, two) = (super::fresh().unwrap(), super::fresh().unwrap());
        assert!(REQUEST_ID_BYTES.contains(&one.len()));
        assert_ne!(one, two);
    }
}
