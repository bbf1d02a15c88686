//! The list of all points: their names, whose they are, whether they can fail.

/// Which process passes a point, and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// A daemon while it starts, before it serves.
    Start,
    /// A daemon that finds what a dead one left.
    Adopt,
    /// A daemon that serves.
    Serve,
    /// A daemon that ends.
    Stop,
    /// A client.
    Client,
}

/// What can be done at a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// The process can be killed there, and the step can fail.
    Fail,
    /// The process can be killed there; nothing there can fail.
    Die,
}

macro_rules! points {
    ($($variant:ident, $name:literal, $stage:ident, $way:ident, $what:literal;)*) => {
        /// A point in the code of a daemon or a client.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Point {
            $(#[doc = $what] $variant,)*
        }

        impl Point {
            /// All points, in the order of a life.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Its name, as it is configured and recorded.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Who passes it.
            #[must_use]
            pub const fn stage(self) -> Stage {
                match self { $(Self::$variant => Stage::$stage,)* }
            }

            /// What can be done there.
            #[must_use]
            pub const fn way(self) -> Way {
                match self { $(Self::$variant => Way::$way,)* }
            }
        }
    };
}

// A point named for a step lies before its effect, one named in the past behind it.
points! {
    Leftovers, "leftovers", Start, Fail, "What a dead daemon left is about to be looked at.";
    Bind, "bind", Start, Fail, "The lock is taken, no socket is bound.";
    Bound, "bound", Start, Fail, "Both sockets are bound, nobody is served.";
    AdoptSegment, "adopt.segment", Adopt, Fail, "A segment is about to be taken over.";
    AdoptedSegment, "adopted.segment", Adopt, Fail, "A segment is mapped and pinned, its set not live.";
    AdoptManager, "adopt.manager", Adopt, Fail, "A manager's record is about to be taken up.";
    AdoptMemory, "adopt.memory", Adopt, Fail, "A client has handed memory back, its label is not read.";
    AdoptRing, "adopt.ring", Adopt, Fail, "A manager is whole, its ring not touched.";
    AdoptedRing, "adopted.ring", Adopt, Die, "The engine fills the ring of an adopted manager.";
    Load, "load", Serve, Fail, "A segment is reserved, nothing read into it.";
    Loaded, "loaded", Serve, Fail, "All bytes are in the segment.";
    Seal, "seal", Serve, Fail, "A segment is about to be made read-only.";
    Publish, "publish", Serve, Fail, "A segment is read-only, under its temporary name.";
    Published, "published", Serve, Die, "A segment has its name.";
    Pin, "pin", Serve, Fail, "A segment is about to be registered with the driver.";
    Pinned, "pinned", Serve, Fail, "A segment is registered, and in no state file.";
    Save, "save", Serve, Fail, "A state file is about to be written.";
    SaveRename, "save.rename", Serve, Fail, "A state file is written under its temporary name.";
    Saved, "saved", Serve, Fail, "A state file is in place, its directory not synchronised.";
    Live, "live", Serve, Die, "A weight set is live, its caller not told.";
    Drop, "drop", Serve, Fail, "A weight set is about to be removed.";
    Dropped, "dropped", Serve, Die, "A weight set's state file is gone, its segment not.";
    Open, "open", Serve, Fail, "A manager is about to be opened.";
    Opened, "opened", Serve, Die, "A manager has its name, its owner is not told.";
    Register, "register", Serve, Fail, "A model is about to be registered.";
    Plan, "plan", Serve, Fail, "A plan is about to be made.";
    Planned, "planned", Serve, Fail, "A plan is made, nothing allocated for it.";
    Allocated, "allocated", Serve, Fail, "Residents are filled and the ring is allocated.";
    Journal, "journal", Serve, Fail, "A journal is about to be made.";
    Journaled, "journaled", Serve, Fail, "A journal is made, and in no record.";
    Install, "install", Serve, Die, "A manager's record is written, the engine not told.";
    Registered, "registered", Serve, Die, "A model is registered, its client not told.";
    Issue, "issue", Serve, Die, "A copy is about to be journalled.";
    Submit, "submit", Serve, Fail, "A copy is journalled, and not submitted.";
    Submitted, "submitted", Serve, Die, "A copy is submitted.";
    Slot, "slot", Serve, Die, "A copy has arrived, its slot word is not written.";
    SlotWritten, "slot.written", Serve, Die, "The slot word of a copy is written.";
    Acquire, "acquire", Serve, Fail, "An acquire over RPC has come.";
    Acquired, "acquired", Serve, Die, "An acquire over RPC has its hold, its client is not told.";
    Release, "release", Serve, Fail, "A release over RPC has come.";
    Released, "released", Serve, Die, "A release over RPC is done, its client not told.";
    End, "end", Serve, Die, "A manager's name is free, its memory not.";
    Detached, "detached", Serve, Die, "The engine has let go of a ring, the record is there.";
    Retire, "retire", Serve, Die, "A manager's record is gone, its memory not.";
    Drain, "drain", Stop, Die, "A drain is about to begin.";
    Drained, "drained", Stop, Die, "The last manager has ended.";
    Stop, "stop", Stop, Die, "Weight sets are about to go.";
    Stopped, "stopped", Stop, Die, "Weight sets are gone, sockets and lock not.";
    ClientOpen, "client.open", Client, Fail, "A client is about to open a manager.";
    ClientOpened, "client.opened", Client, Fail, "A client has a lease, and no doorbell.";
    ClientRegister, "client.register", Client, Fail, "A client is about to register its model.";
    ClientRegistered, "client.registered", Client, Fail, "A client's model is registered, and not mapped.";
    ClientMapped, "client.mapped", Client, Fail, "A client has mapped its plan.";
    ClientAcquire, "client.acquire", Client, Fail, "A client is about to acquire a layer.";
    ClientAcquired, "client.acquired", Client, Die, "A client holds a layer, or has queued that.";
    ClientWait, "client.wait", Client, Die, "A client has written what it waits for.";
    ClientRelease, "client.release", Client, Die, "A client is about to give a layer back.";
    ClientReleased, "client.released", Client, Die, "A client has given a layer back.";
    ClientCall, "client.call", Client, Fail, "A client is about to acquire over RPC.";
    ClientCalled, "client.called", Client, Die, "A client has a hold over RPC.";
    ClientResume, "client.resume", Client, Fail, "A client is about to take its lease up again.";
    ClientResumed, "client.resumed", Client, Fail, "A client's lease is taken up, it has no doorbell yet.";
    ClientClose, "client.close", Client, Fail, "A client is about to close its manager.";
    ClientClosed, "client.closed", Client, Die, "A client's manager is closed.";
}

impl Point {
    /// The point of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|point| point.name() == name)
    }
}
