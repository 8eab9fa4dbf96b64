//! Originates RSTs that no packet turns into (FORWARDING 2 and 3). Each counts as originated: its cause is the end of
//! another packet.
//!
//! Not here: the decision to send a reset.

use super::engine::Engine;
use super::observer::Observe;
use super::rewrite;
use crate::forward::rewrite::Reset;
use crate::port::{Arrival, Port};
use crate::wire::Buffer;
use crate::workers::Lanes;

impl<B: Buffer, O: Observe<B>> Engine<B, O> {
    /// Sends resets; those that are answers (`limited`) within the rate limit. Without a free buffer a reset is not
    /// sent: its receiver times out by itself.
    #[cold]
    pub(super) fn originate<P: Port<Buffer = B>>(
        &mut self,
        lanes: &mut Lanes<P>,
        arrival: Arrival,
        resets: &[Reset],
        limited: bool,
    ) {
        for reset in resets {
            if limited && !self.limiter.allow_ip(reset.destination.ip(), arrival.now_ns) {
                continue;
            }
            let Some(mut buffer) = lanes.allocate(reset.exit.port) else { continue };
            if rewrite::write_reset(&mut buffer, reset) {
                self.tally.originated += 1;
                lanes.leave(reset.exit.port, reset.exit.link.tags(), buffer, &mut self.tally);
            } else {
                lanes.discard(buffer);
            }
        }
    }
}
