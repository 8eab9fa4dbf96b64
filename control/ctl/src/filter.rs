//! Compiles filters with libpcap, in this process: libpcap may look up names of hosts and ports, which the sandbox of a
//! gateway forbids (docs/internals/decisions/0053).
//!
//! Invariant: the program is for Ethernet frames, and the gateway checks it again.

use pcap::{Capture, Linktype};
use proto::v1;

/// A filter that libpcap does not accept, in its words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the filter {expression:?} is not valid: {reason}; pcap-filter(7) describes the syntax")]
pub struct InvalidFilter {
    /// The filter.
    pub expression: String,
    /// What libpcap says.
    pub reason: String,
}

/// Compiles a filter. An empty one matches every packet.
///
/// # Errors
/// If libpcap does not accept it.
pub(super) fn compile(expression: &str) -> Result<Vec<v1::FilterInstruction>, InvalidFilter> {
    if expression.trim().is_empty() {
        return Ok(Vec::new());
    }
    let invalid = |reason: String| InvalidFilter { expression: expression.to_owned(), reason };
    let refused = |error: pcap::Error| match error {
        pcap::Error::PcapError(words) => invalid(words),
        other => invalid(other.to_string()),
    };
    let handle = Capture::dead(Linktype::ETHERNET).map_err(refused)?;
    let program = handle.compile(expression, true).map_err(refused)?;
    // The library shows an instruction as text only: "code jt jf k".
    let instructions = program.get_instructions().iter().map(|instruction| read(&instruction.to_string()));
    instructions.collect::<Option<_>>().ok_or_else(|| invalid("libpcap's program cannot be read".to_owned()))
}

fn read(text: &str) -> Option<v1::FilterInstruction> {
    let mut numbers = text.split(' ').map(|number| number.parse().ok());
    let mut next = || numbers.next().flatten();
    Some(v1::FilterInstruction { code: next()?, jump_true: next()?, jump_false: next()?, value: next()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_is_compiled_for_ethernet_and_a_bad_one_says_what_libpcap_says() {
        assert_eq!(compile("  ").unwrap(), []);
        let program = compile("ip6 and udp").unwrap();
        // As `tcpdump -y EN10MB -ddd 'ip6 and udp'` prints it.
        let row = |code, jump_true, jump_false, value| v1::FilterInstruction { code, jump_true, jump_false, value };
        assert_eq!(program[0], row(40, 0, 0, 12));
        assert_eq!(program[1].value, 0x86dd);
        assert_eq!(program.last().unwrap().code, 6);
        let bad = compile("tcp prot 80").unwrap_err();
        assert!(bad.reason.contains("syntax error"), "{bad}");
        assert!(bad.to_string().contains("\"tcp prot 80\" is not valid"), "{bad}");
        assert!(compile("host 1.2.3.4 and port nowhere").unwrap_err().reason.contains("nowhere"));
        assert!(compile("tcp\0").is_err());
    }
}
