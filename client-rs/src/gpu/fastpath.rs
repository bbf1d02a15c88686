//! Acquire and release on the caller's stream: counted here, queued there. No RPC, and
//! nothing waits on the host.

use std::sync::{Arc, atomic::Ordering};

use flextensord_device::{
    cuda::stream::CallerStream,
    failpoint::{self, Point},
};

use super::{
    Core, Gpu, Mark, OnStream,
    order::{Mode, Order},
};
use crate::{
    error::ClientError,
    hold::Hold,
    holds::HoldTable,
    lease::Fate,
    plan::{Layer, LayerId},
    plane::{Ended, Plane},
};

/// A release that was not queued.
struct Refusal {
    error: ClientError,
    /// The hold goes on, and may be ended by a later call.
    stays: bool,
}

impl Refusal {
    fn gone(error: ClientError) -> Self {
        Self {
            error,
            stays: false,
        }
    }
}

impl Plane {
    /// Holds a layer on `stream`: what is queued there from here on finds its bytes.
    pub(crate) fn acquire_on(
        self: &Arc<Self>,
        id: LayerId,
        stream: CallerStream,
    ) -> Result<Hold, ClientError> {
        let on = self.hold_on(id, stream)?;
        Ok(Hold::new(self.clone(), id, None, Some(on)))
    }

    /// As [`Plane::acquire_on`], for a caller that counts for itself.
    pub(crate) fn hold_on(
        &self,
        id: LayerId,
        stream: CallerStream,
    ) -> Result<OnStream, ClientError> {
        let core = self.core("acquire_on", "acquire, which waits on its thread")?;
        failpoint::pass(Point::ClientAcquire)?;
        let layer = self.enter(id)?;
        if self.rpc_busy.load(Ordering::Acquire) {
            return Err(ClientError::OrderBroken {
                layer: layer.name.clone(),
            });
        }
        let mut table = self.table();
        let mut order = core.order();
        core.check_open()?;
        // resident parts are always there and touch no word
        if layer.streamed.is_empty() {
            order.count(id);
            return Ok(OnStream::new(stream, None));
        }
        let mode = self
            .enter_mode(core, &mut order, &mut table, stream)
            .map_err(|error| core.explain(error))?;
        self.check_overlap(&table, id, layer)?;
        let mut fresh = std::mem::take(&mut order.parts);
        fresh.clear();
        fresh.extend(layer.streamed.iter().filter(|part| table.add(**part)));
        let queued = self.queue(core, &mut order, stream, mode, |core| {
            core.take(stream, &fresh)
        });
        let touched = !fresh.is_empty();
        order.parts = fresh;
        if let Err(error) = queued {
            for &part in &layer.streamed {
                table.remove(part);
            }
            return Err(core.explain(error));
        }
        order.count(id);
        drop((order, table));
        self.wake_after(mode, touched);
        failpoint::cross(Point::ClientAcquired);
        Ok(OnStream::new(stream, mode.capture()))
    }

    /// Gives a layer back on `stream`, behind what is queued there.
    pub(crate) fn release_on(&self, id: LayerId, stream: CallerStream) -> Result<(), ClientError> {
        let core = self.core("release_on", "release of its hold")?;
        let layer = self.enter(id)?;
        let released = self.unhold(core, id, layer, stream, None);
        released.map_err(|refusal| core.explain(refusal.error))
    }

    /// The end of a hold.
    pub(crate) fn settle_on(
        &self,
        gpu: &Gpu,
        ended: Ended,
        on: OnStream,
    ) -> Result<(), ClientError> {
        let core = gpu.core();
        let layer = self.plan.layer(ended.layer)?;
        let Err(refusal) = self.unhold(core, ended.layer, layer, on.stream, Some(on)) else {
            return Ok(());
        };
        if refusal.stays {
            self.park(ended);
        }
        Err(core.explain(refusal.error))
    }

    /// Before a call over RPC: outside captures, behind all that was queued, and on
    /// `stream` where one is named.
    pub(crate) fn order_rpc(
        &self,
        gpu: &Gpu,
        stream: Option<CallerStream>,
    ) -> Result<Mark, ClientError> {
        let core = gpu.core();
        let mut table = self.table();
        let mut order = core.order();
        core.check_open()?;
        let marked = match stream {
            None => order.cross(Mode::Eager, &mut table, &self.plan),
            Some(stream) => self
                .enter_mode(core, &mut order, &mut table, stream)
                .and_then(|mode| match mode {
                    Mode::Eager => order.follow(&core.context, stream, mode),
                    Mode::Captured(_) => Err(ClientError::State(
                        "a hold over RPC cannot be released in a capture",
                    )),
                }),
        };
        let marked = marked.and_then(|()| order.mark(&core.context));
        marked.map_err(|error| core.explain(error))
    }

    /// `on` says where the hold was taken; none where the caller counts.
    fn unhold(
        &self,
        core: &Core,
        id: LayerId,
        layer: &Layer,
        stream: CallerStream,
        on: Option<OnStream>,
    ) -> Result<(), Refusal> {
        let mut table = self.table();
        let mut order = core.order();
        let over = core.check_open().is_err();
        if over || layer.streamed.is_empty() {
            // no word is touched
            let held = order.uncount(id);
            if held && !layer.streamed.is_empty() {
                table.release(&layer.streamed, |_| ());
            }
            return if held || over {
                Ok(())
            } else {
                Err(Refusal::gone(not_held(layer)))
            };
        }
        let inside = on.and_then(|on| on.capture);
        let kept = |error| Refusal {
            error,
            stays: inside.is_none() && core.context.failure().is_none(),
        };
        let mode = order
            .mode(&core.context, stream, &mut table, &self.plan)
            .map_err(kept)?;
        if let Some(capture) = inside
            && mode != Mode::Captured(capture)
        {
            // its capture is over; who was told of that already is not told again
            if order.records(capture) {
                let crossed = order.cross(mode, &mut table, &self.plan);
                crossed.map_err(Refusal::gone)?;
            }
            return Ok(());
        }
        order.cross(mode, &mut table, &self.plan).map_err(kept)?;
        if !order.is_held(id) {
            return Err(Refusal::gone(not_held(layer)));
        }
        // what reads the layer may have been queued there since the last call
        if let Some(taken) = on.and_then(|on| on.taken).filter(|taken| *taken != stream) {
            self.join(core, &mut order, &mut table, taken, mode)
                .map_err(kept)?;
        }
        let mut last = std::mem::take(&mut order.parts);
        last.clear();
        last.extend(layer.streamed.iter().filter(|part| table.remove(**part)));
        let queued = self.queue(core, &mut order, stream, mode, |core| {
            Ok(core.slots()?.give_back(stream, &last)?)
        });
        let touched = !last.is_empty();
        order.parts = last;
        if let Err(error) = queued {
            for &part in &layer.streamed {
                table.add(part);
            }
            return Err(kept(error));
        }
        order.uncount(id);
        drop((order, table));
        self.wake_after(mode, touched);
        Ok(())
    }

    /// How `stream` stands, with the edge to it crossed.
    fn enter_mode(
        &self,
        core: &Core,
        order: &mut Order,
        table: &mut HoldTable,
        stream: CallerStream,
    ) -> Result<Mode, ClientError> {
        let mode = order.mode(&core.context, stream, table, &self.plan)?;
        order.cross(mode, table, &self.plan)?;
        Ok(mode)
    }

    /// Puts what is queued on `taken` before what comes next.
    fn join(
        &self,
        core: &Core,
        order: &mut Order,
        table: &mut HoldTable,
        taken: CallerStream,
        mode: Mode,
    ) -> Result<(), ClientError> {
        if order.mode(&core.context, taken, table, &self.plan)? != mode {
            return Err(ClientError::State(
                "one of the streams that a layer is acquired and released on is being captured, \
                 the other not",
            ));
        }
        order.follow(&core.context, taken, mode)
    }

    /// Queues `what` behind all before it. Also where no word is touched, the streams of
    /// nested holds are put in one order: a part is given back once, behind all of them.
    fn queue(
        &self,
        core: &Core,
        order: &mut Order,
        stream: CallerStream,
        mode: Mode,
        what: impl FnOnce(&Core) -> Result<(), ClientError>,
    ) -> Result<(), ClientError> {
        if order.last().is_none() && !order.has_recorded() {
            // from now on the end of the lease may find work queued
            self.lease.note_fate(Fate::Unknown);
        }
        order.follow(&core.context, stream, mode)?;
        what(core)
    }

    /// A GPU that writes a word wakes nobody; a capture changes none.
    fn wake_after(&self, mode: Mode, touched: bool) {
        if touched && mode == Mode::Eager {
            self.lease.wake_engine();
        }
    }

    fn core(&self, call: &'static str, instead: &'static str) -> Result<&Core, ClientError> {
        match &self.gpu {
            Some(gpu) => Ok(gpu.core()),
            None => Err(self.wrong_device(call, instead)),
        }
    }
}

fn not_held(layer: &Layer) -> ClientError {
    ClientError::NotHeld {
        layer: layer.name.clone(),
    }
}
