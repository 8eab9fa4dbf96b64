//! Sends the RSTs that no packet became (FORWARDING 2 and 3). Each is originated: its cause is another packet's end.

use super::{Arrival, Engine};
use crate::decide::Reset;
use crate::lanes::Lanes;
use crate::observe::Observe;
use crate::tags::Tags;
use crate::{Buffer, Port, answer};

impl<B: Buffer, O: Observe<B>> Engine<B, O> {
    /// Sends resets; those that are answers (`limited`) as far as the rate allows. One that finds no buffer is not sent:
    /// its receiver gives up by itself.
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
            if answer::write_reset(&mut buffer, reset) {
                self.tally.originated += 1;
                lanes.leave(reset.exit.port, Tags::on(reset.exit.link), buffer, &mut self.tally);
            } else {
                lanes.discard(buffer);
            }
        }
    }
}
