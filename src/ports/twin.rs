//! The Linux twins of the ports: persistent taps that carry a port's addresses, and the one thread that moves frames
//! between them and the workers.
//!
//! A twin that somebody deletes is made again by whoever attends to its port (`hardware`), and the thread takes its new tap.
//!
//! A twin outlives the process with its addresses, so that routes and BGP sessions stand while the gateway restarts; what
//! it added and the configuration no longer names, the next start removes. Deliberately not here: routes, which are the
//! operator's, and how much Linux is given, which the worker decides.

mod interface;
mod reconciler;
mod thread;

pub use interface::{Interface, TwinConfig, TwinError};
pub(super) use reconciler::AttendedTwin;
pub use thread::{NewTap, TwinCounters, TwinPort, TwinThread};
