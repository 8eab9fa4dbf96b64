//! Why there is no figure.
//!
//! Not here: checks, each of which is where its values are.

use std::io;

/// Why there is no figure.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The core cannot be used.
    #[error("core {0} cannot be used: it does not exist or this process may not run on it; see `taskset -p $$`")]
    Core(usize),
    /// A packet left the engine that should not have left like that.
    #[error("a transmitted packet is wrong: {0}; the figures would mean nothing")]
    Wrong(String),
    /// Packets were lost, or counted twice.
    #[error("packets are not accounted for ({0}); the figures would mean nothing")]
    Account(String),
    /// SNAT ports were reused before they had rested, so opening a flow cost less than it may.
    #[error("{0} SNAT ports were reused before they had rested; take more --backends, or fewer --flows")]
    ReusedEarly(u64),
    /// Options contradict each other: exit code 2.
    #[error("{0}")]
    Options(&'static str),
    /// There is no memory for the packet buffers.
    #[error("no memory for {0} packet buffers: lower --buffers")]
    Buffers(usize),
    /// There is no memory for the table of which random lines are read.
    #[error("no memory for a table of {0} bytes")]
    Table(usize),
    /// There is no memory for the frames.
    #[error("no memory for {0} bytes of frames: lower --flows")]
    Trace(usize),
    /// Another worker failed.
    #[error("another worker failed")]
    OtherWorker,
    /// Packets of known flows were dropped.
    #[error("packets of known flows were dropped ({0}), where none may be; the figures would mean nothing")]
    Dropped(String),
    /// There is no memory for so many flows.
    #[error(transparent)]
    NoMemory(#[from] dataplane::NoMemory),
    /// The report cannot be written.
    #[error("cannot write the report: {0}")]
    Write(#[from] io::Error),
    /// DPDK could not be set up.
    #[error("DPDK: {0}")]
    Dpdk(String),
}

impl BenchError {
    /// Whether the options are wrong (exit code 2), rather than the measurement having failed (exit code 1).
    #[must_use]
    pub const fn is_usage(&self) -> bool {
        matches!(self, Self::Options(_))
    }
}
