//! Registering a model, and mapping the plan that comes of it.

use std::{
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
};

use flextensord_device::{
    control::{ControlIdentity, ControlPage},
    cuda::context::Context,
    mapping::{Access, Mapping},
};
use flextensord_proto::v1::{
    Allocation, GetPlanRequest, Layer as LayerMessage, PlanMemory, RegisterHeader, RegisterLayers,
    RegisterModelRequest, RegisterModelResponse, offload_client::OffloadClient, register_header,
    register_model_request::Part,
};
use prost::Message as _;
use tokio::sync::mpsc;

use crate::{
    connection::{Client, request},
    error::ClientError,
    gpu::{Gpu, Imported, Source, ending},
    lease::Lease,
    memory::PlaneMemory,
    plan::Plan,
    plane::Plane,
    request_id, rpc_holds,
};

/// Most bytes of layers in one message, under 1 MiB; a single larger layer goes alone.
const LAYERS_BYTES: usize = 900 << 10;

/// A layer to register.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LayerSpec {
    /// Unique within the manager.
    pub name: String,
    /// Names of tensors of the weight set.
    pub tensors: Vec<String>,
}

/// What a manager may hold on the device, ring and shared residents included.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Budget {
    /// Share of the device's total memory, over 0 and up to 1.
    Fraction(f64),
    /// Bytes.
    Bytes(u64),
}

/// Registers the layers.
pub(crate) async fn register(
    client: &Client,
    lease: &Lease,
    weight_set: &str,
    layers: &[LayerSpec],
    budget: Budget,
) -> Result<RegisterModelResponse, ClientError> {
    let header = RegisterHeader {
        request_id: request_id::fresh()?,
        token: lease.token.0.clone(),
        weight_set: weight_set.to_owned(),
        budget: Some(match budget {
            Budget::Fraction(share) => register_header::Budget::MemoryFraction(share),
            Budget::Bytes(bytes) => register_header::Budget::BudgetBytes(bytes),
        }),
    };
    let mut messages = vec![RegisterModelRequest {
        part: Some(Part::Header(header)),
    }];
    messages.extend(in_messages(layers));
    let limit = client.options().long_timeout;
    let answer = lease.call(client, "RegisterModel", limit, |channel| {
        let message = request(tokio_stream::iter(messages.clone()), limit);
        async move {
            let answer = OffloadClient::new(channel).register_model(message).await?;
            Ok(answer.into_inner())
        }
    });
    answer.await
}

fn in_messages(layers: &[LayerSpec]) -> Vec<RegisterModelRequest> {
    let mut messages = Vec::new();
    let mut current = RegisterLayers::default();
    let mut bytes = 0;
    for layer in layers {
        let layer = LayerMessage {
            name: layer.name.clone(),
            tensors: layer.tensors.clone(),
        };
        let size = layer.encoded_len() + 8;
        if bytes + size > LAYERS_BYTES && !current.layers.is_empty() {
            messages.push(std::mem::take(&mut current));
            bytes = 0;
        }
        bytes += size;
        current.layers.push(layer);
    }
    messages.push(current);
    let part = |layers| RegisterModelRequest {
        part: Some(Part::Layers(layers)),
    };
    messages.into_iter().map(part).collect()
}

/// Fetches the plan in force, and maps its pages and memory, into `context` on a GPU.
pub(crate) async fn map_plan(
    client: &Client,
    lease: &Arc<Lease>,
    context: Option<&Arc<Context>>,
) -> Result<Plane, ClientError> {
    let limit = client.options().call_timeout;
    let message = GetPlanRequest {
        token: lease.token.0.clone(),
        tickets: true,
    };
    let pages = lease.call(client, "GetPlan", limit, |channel| {
        let message = request(message.clone(), limit);
        async move {
            let mut stream = OffloadClient::new(channel)
                .get_plan(message)
                .await?
                .into_inner();
            let mut pages = Vec::new();
            while let Some(page) = stream.message().await? {
                pages.push(page);
            }
            Ok(pages)
        }
    });
    let (plan, memory) = Plan::read(pages.await?)?;
    let identity = ControlIdentity {
        lease_epoch: lease.epoch,
        plan_version: plan.version(),
        parts: memory.parts,
    };
    let source = Source {
        socket: client.location().socket.clone(),
        generation: lease.generation(),
    };
    let (context, their_lease) = (context.cloned(), lease.clone());
    let ids = memory.allocations.iter().map(|memory| memory.id).collect();
    // on a thread that may block: the driver takes its time
    let mapped = client.descriptors(move |channel| {
        let control = ControlPage::open(channel.redeem(&memory.control_ticket)?, identity)?;
        let control = Arc::new(control);
        let place = context.as_ref().map(|context| (context, &source));
        let allocations = map_allocations(&memory, place, |ticket| channel.redeem(ticket))?;
        let on_gpu = allocations.iter().filter_map(|memory| match memory {
            Some(PlaneMemory::Device(imported)) => Some(Arc::clone(imported)),
            Some(PlaneMemory::Host(..)) | None => None,
        });
        let on_gpu: Vec<_> = on_gpu.collect();
        let gpu = context
            .map(|context| Gpu::new(&plan, &control, context, on_gpu, &their_lease, limit))
            .transpose()?;
        Ok((plan, control, allocations, gpu))
    });
    let (plan, control, allocations, gpu) = mapped.await?;
    let (sender, jobs) = mpsc::unbounded_channel();
    let runtime = client.runtime()?;
    runtime.spawn(rpc_holds::serve(client.clone(), lease.clone(), jobs));
    if let Some(gpu) = &gpu {
        runtime.spawn(ending::watch(gpu.weak(), lease.clone()));
    }
    Ok(Plane::new(
        plan,
        control,
        allocations,
        ids,
        gpu,
        lease.clone(),
        sender,
    ))
}

/// Maps the allocations of a plan: into the context of a GPU where there is one.
fn map_allocations(
    memory: &PlanMemory,
    gpu: Option<(&Arc<Context>, &Source)>,
    redeem: impl Fn(&[u8]) -> Result<OwnedFd, ClientError>,
) -> Result<Vec<Option<PlaneMemory>>, ClientError> {
    let map = |allocation: &Allocation| {
        if allocation.bytes == 0 {
            return Ok(None);
        }
        let bytes = allocation.bytes;
        let descriptor = redeem(&allocation.ticket)?;
        let Some((context, source)) = gpu else {
            let size = usize::try_from(bytes).map_err(|_| ClientError::Range {
                what: format!("allocation {}, in bytes,", allocation.id),
                value: bytes,
                rule: "more than this process can address".to_owned(),
            })?;
            let mapping = Mapping::new(descriptor.as_fd(), size, Access::Read)?;
            return Ok(Some(PlaneMemory::Host(mapping, descriptor)));
        };
        let imported = if allocation.ring {
            Imported::ring(context, descriptor, bytes)
        } else {
            Imported::residents(context, source, allocation.id, descriptor, bytes)
        };
        let imported = imported.map_err(|source| ClientError::Import { bytes, source })?;
        Ok(Some(PlaneMemory::Device(imported)))
    };
    memory.allocations.iter().map(map).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_go_in_messages_under_a_mebibyte_and_keep_their_order() {
        let layers: Vec<_> = (0..3000)
            .map(|n| LayerSpec {
                name: n.to_string(),
                tensors: vec!["t".repeat(500); 2],
            })
            .collect();
        let messages = in_messages(&layers);
        assert!(messages.len() > 2);
        assert!(
            messages
                .iter()
                .all(|message| message.encoded_len() < 1 << 20)
        );
        let names = messages.iter().flat_map(|message| match &message.part {
            Some(Part::Layers(part)) => {
                part.layers.iter().map(|layer| layer.name.clone()).collect()
            }
            _ => Vec::new(),
        });
        assert!(names.eq(layers.iter().map(|layer| layer.name.clone())));
    }
}
