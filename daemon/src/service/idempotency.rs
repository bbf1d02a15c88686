//! stub
use flextensord_proto::kind::Failure;
#[derive(Debug, Default)]
/// x
pub struct Idempotency;
impl Idempotency {
    /// x
    pub async fn once<T>(
        &self,
        _key: (u32, &str, &str),
        _content: &[u8],
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        work.await
    }
}
