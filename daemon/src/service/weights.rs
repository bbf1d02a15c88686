//! stub
use crate::weights::{manifest::TensorEntry, set::WeightSet};
use flextensord_proto::v1;
/// x
pub fn weight_set_message(_s: &WeightSet) -> v1::WeightSet {
    v1::WeightSet::default()
}
/// x
pub fn tensor_message(_t: &TensorEntry) -> v1::Tensor {
    v1::Tensor::default()
}
