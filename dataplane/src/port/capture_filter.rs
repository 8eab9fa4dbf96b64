//! Capture filters: classic BPF programs (McCanne and Jacobson 1993; pcap-filter(7)), checked once and then interpreted
//! over the bytes of frames.
//!
//! **Invariant:** a program ends after at most [`FILTER_INSTRUCTIONS_MAX`] instructions, because jumps lead forward
//! only. It reads the frame and its own 16 words, and nothing else.
//!
//! Not here: the compiler, which is libpcap in `sluicectl` (docs/internals/decisions/0053).

/// Maximum number of instructions. Each takes about 2 ns, so a frame takes at most 2 us; `host` with 100 addresses
/// compiles to about 400.
pub const FILTER_INSTRUCTIONS_MAX: usize = 1024;
/// Words of memory of a program (`BPF_MEMWORDS`).
const MEMORY_WORDS: u32 = 16;

/// An instruction in the encoding of `struct bpf_insn`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FilterInstruction {
    /// Operation code.
    pub code: u16,
    /// Instructions to skip when a condition holds.
    pub jump_true: u8,
    /// Instructions to skip when it does not.
    pub jump_false: u8,
    /// Operand.
    pub value: u32,
}

/// Why a program is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FilterError {
    /// It is too long.
    #[error(
        "the filter has {0} instructions, at most {FILTER_INSTRUCTIONS_MAX} are allowed; make it shorter, with networks for example"
    )]
    Long(usize),
    /// Its end can be passed.
    #[error("the filter does not end with a return")]
    NoReturn,
    /// A jump leaves the program.
    #[error("instruction {0} of the filter jumps behind its end")]
    Jump(usize),
    /// An unknown operation, or one that is always an error.
    #[error("instruction {at} of the filter is not classic BPF: code {code:#06x}, operand {value}")]
    Instruction {
        /// Its number, from 0.
        at: usize,
        /// Its code.
        code: u16,
        /// Its operand.
        value: u32,
    },
}

/// Bytes that a load reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    Byte,
    Half,
    Word,
}

/// The second operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operand {
    Constant(u32),
    Index,
}

/// The operand that is loaded into a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Load {
    Constant(u32),
    Frame {
        at: u32,
        width: Width,
    },
    /// At an offset from the index register.
    Indexed {
        at: u32,
        width: Width,
    },
    Memory(u8),
    FrameLength,
    /// Four times the low half of a byte: the length of an IPv4 header.
    HeaderLength {
        at: u32,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arithmetic {
    Add,
    Subtract,
    Multiply,
    Divide,
    Or,
    And,
    ShiftLeft,
    ShiftRight,
    Modulo,
    Xor,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Condition {
    Equal,
    Greater,
    GreaterOrEqual,
    AnyBit,
}

/// A checked instruction. `then` and `otherwise` are positions in the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Load(Load),
    LoadIndex(Load),
    Store(u8),
    StoreIndex(u8),
    Arithmetic(Arithmetic, Operand),
    Negate,
    Jump(u16),
    Branch { condition: Condition, operand: Operand, then: u16, otherwise: u16 },
    Return(u32),
    ReturnAccumulator,
    ToIndex,
    FromIndex,
}

/// A checked program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PacketFilter(Box<[Operation]>);

impl PacketFilter {
    /// Checks a program. A program without instructions matches every frame.
    ///
    /// # Errors
    /// See [`FilterError`].
    pub fn new(program: &[FilterInstruction]) -> Result<Self, FilterError> {
        if program.len() > FILTER_INSTRUCTIONS_MAX {
            return Err(FilterError::Long(program.len()));
        }
        let operations = (0..).zip(program).map(|(at, instruction)| operation(at, instruction, program.len()));
        let operations = operations.collect::<Result<Box<[_]>, _>>()?;
        match operations.last() {
            None | Some(Operation::Return(_) | Operation::ReturnAccumulator) => Ok(Self(operations)),
            Some(_) => Err(FilterError::NoReturn),
        }
    }

    /// Whether a frame matches. As everywhere in BPF, a load behind the end of the frame and a division by 0 mean no.
    #[must_use]
    pub fn matches(&self, frame: &[u8]) -> bool {
        self.0.is_empty() || self.run(frame).is_some_and(|accepted| accepted != 0)
    }

    fn run(&self, frame: &[u8]) -> Option<u32> {
        let (mut accumulator, mut index, mut memory) = (0_u32, 0_u32, [0_u32; MEMORY_WORDS as usize]);
        let mut next = 0;
        loop {
            let operation = self.0.get(next)?;
            next += 1;
            match *operation {
                Operation::Load(load) => accumulator = loaded(load, frame, index, &memory)?,
                Operation::LoadIndex(load) => index = loaded(load, frame, index, &memory)?,
                Operation::Store(at) => *memory.get_mut(usize::from(at))? = accumulator,
                Operation::StoreIndex(at) => *memory.get_mut(usize::from(at))? = index,
                Operation::Arithmetic(of, operand) => accumulator = computed(of, accumulator, of_operand(operand, index))?,
                Operation::Negate => accumulator = accumulator.wrapping_neg(),
                Operation::Jump(to) => next = usize::from(to),
                Operation::Branch { condition, operand, then, otherwise } => {
                    let holds = holds(condition, accumulator, of_operand(operand, index));
                    next = usize::from(if holds { then } else { otherwise });
                }
                Operation::Return(accepted) => return Some(accepted),
                Operation::ReturnAccumulator => return Some(accumulator),
                Operation::ToIndex => index = accumulator,
                Operation::FromIndex => accumulator = index,
            }
        }
    }
}

const fn of_operand(operand: Operand, index: u32) -> u32 {
    match operand {
        Operand::Constant(value) => value,
        Operand::Index => index,
    }
}

const fn holds(condition: Condition, a: u32, b: u32) -> bool {
    match condition {
        Condition::Equal => a == b,
        Condition::Greater => a > b,
        Condition::GreaterOrEqual => a >= b,
        Condition::AnyBit => a & b != 0,
    }
}

fn computed(of: Arithmetic, a: u32, b: u32) -> Option<u32> {
    Some(match of {
        Arithmetic::Add => a.wrapping_add(b),
        Arithmetic::Subtract => a.wrapping_sub(b),
        Arithmetic::Multiply => a.wrapping_mul(b),
        Arithmetic::Divide => a.checked_div(b)?,
        Arithmetic::Or => a | b,
        Arithmetic::And => a & b,
        Arithmetic::ShiftLeft => a.checked_shl(b).unwrap_or(0),
        Arithmetic::ShiftRight => a.checked_shr(b).unwrap_or(0),
        Arithmetic::Modulo => a.checked_rem(b)?,
        Arithmetic::Xor => a ^ b,
    })
}

fn loaded(load: Load, frame: &[u8], index: u32, memory: &[u32]) -> Option<u32> {
    match load {
        Load::Constant(value) => Some(value),
        Load::Frame { at, width } => read(frame, at, width),
        Load::Indexed { at, width } => read(frame, at.checked_add(index)?, width),
        Load::Memory(at) => memory.get(usize::from(at)).copied(),
        Load::FrameLength => u32::try_from(frame.len()).ok(),
        Load::HeaderLength { at } => Some((read(frame, at, Width::Byte)? & 0xf) << 2),
    }
}

fn read(frame: &[u8], at: u32, width: Width) -> Option<u32> {
    let bytes = frame.get(usize::try_from(at).ok()?..)?;
    match width {
        Width::Byte => bytes.first().map(|byte| u32::from(*byte)),
        Width::Half => bytes.first_chunk().map(|bytes| u32::from(u16::from_be_bytes(*bytes))),
        Width::Word => bytes.first_chunk().map(|bytes| u32::from_be_bytes(*bytes)),
    }
}

/// The checked form of the instruction `at` of a program of `len` instructions.
fn operation(at: usize, instruction: &FilterInstruction, len: usize) -> Result<Operation, FilterError> {
    let FilterInstruction { code, jump_true, jump_false, value } = *instruction;
    let unknown = FilterError::Instruction { at, code, value };
    let memory = || u8::try_from(value).ok().filter(|_| value < MEMORY_WORDS).ok_or(unknown);
    let target = |skip: u32| {
        let to = usize::try_from(skip).ok().and_then(|skip| (at + 1).checked_add(skip)).filter(|to| *to < len);
        to.and_then(|to| u16::try_from(to).ok()).ok_or(FilterError::Jump(at))
    };
    if code > 0xff {
        return Err(unknown);
    }
    let operand = if code & 0x08 == 0 { Operand::Constant(value) } else { Operand::Index };
    Ok(match (code & 0x07, code & 0xf8) {
        (0x00, _) => Operation::Load(load(code, value).ok_or(unknown)?),
        (0x01, 0xb0) => Operation::LoadIndex(Load::HeaderLength { at: value }),
        (0x01, 0x00 | 0x60 | 0x80) => Operation::LoadIndex(load(code, value).ok_or(unknown)?),
        (0x02, 0x00) => Operation::Store(memory()?),
        (0x03, 0x00) => Operation::StoreIndex(memory()?),
        (0x04, 0x80) => Operation::Negate,
        (0x04, _) => Operation::Arithmetic(arithmetic(code, operand).ok_or(unknown)?, operand),
        (0x05, 0x00) => Operation::Jump(target(value)?),
        (0x05, _) => {
            let condition = condition(code).ok_or(unknown)?;
            Operation::Branch { condition, operand, then: target(jump_true.into())?, otherwise: target(jump_false.into())? }
        }
        (0x06, 0x00) => Operation::Return(value),
        (0x06, 0x10) => Operation::ReturnAccumulator,
        (0x07, 0x00) => Operation::ToIndex,
        (0x07, 0x80) => Operation::FromIndex,
        _ => return Err(unknown),
    })
}

fn load(code: u16, value: u32) -> Option<Load> {
    let width = match code & 0x18 {
        0x00 => Width::Word,
        0x08 => Width::Half,
        0x10 => Width::Byte,
        _ => return None,
    };
    Some(match (code & 0xe0, width) {
        (0x00, Width::Word) => Load::Constant(value),
        (0x20, width) => Load::Frame { at: value, width },
        (0x40, width) => Load::Indexed { at: value, width },
        (0x60, Width::Word) => Load::Memory(u8::try_from(value).ok().filter(|_| value < MEMORY_WORDS)?),
        (0x80, Width::Word) => Load::FrameLength,
        _ => return None,
    })
}

/// `None` for unknown ones, and those whose constant is always an error.
fn arithmetic(code: u16, operand: Operand) -> Option<Arithmetic> {
    let of = match code & 0xf0 {
        0x00 => Arithmetic::Add,
        0x10 => Arithmetic::Subtract,
        0x20 => Arithmetic::Multiply,
        0x30 => Arithmetic::Divide,
        0x40 => Arithmetic::Or,
        0x50 => Arithmetic::And,
        0x60 => Arithmetic::ShiftLeft,
        0x70 => Arithmetic::ShiftRight,
        0x90 => Arithmetic::Modulo,
        0xa0 => Arithmetic::Xor,
        _ => return None,
    };
    let is_valid = match (of, operand) {
        (Arithmetic::Divide | Arithmetic::Modulo, Operand::Constant(value)) => value != 0,
        (Arithmetic::ShiftLeft | Arithmetic::ShiftRight, Operand::Constant(value)) => value < 32,
        _ => true,
    };
    is_valid.then_some(of)
}

const fn condition(code: u16) -> Option<Condition> {
    Some(match code & 0xf0 {
        0x10 => Condition::Equal,
        0x20 => Condition::Greater,
        0x30 => Condition::GreaterOrEqual,
        0x40 => Condition::AnyBit,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::Packet;

    /// A program as `tcpdump -y EN10MB -ddd EXPRESSION` prints it, without the number of instructions.
    fn program(text: &str) -> Vec<FilterInstruction> {
        let numbers: Vec<u32> = text.split_whitespace().map(|number| number.parse().unwrap()).collect();
        let instruction = |n: &[u32]| FilterInstruction {
            code: n[0].try_into().unwrap(),
            jump_true: n[1].try_into().unwrap(),
            jump_false: n[2].try_into().unwrap(),
            value: n[3],
        };
        numbers.chunks_exact(4).map(instruction).collect()
    }

    fn filter(text: &str) -> PacketFilter {
        PacketFilter::new(&program(text)).unwrap()
    }

    fn tagged(frame: &[u8], vlan: u16) -> Vec<u8> {
        [&frame[..12], &[0x81, 0], &vlan.to_be_bytes(), &frame[12..]].concat()
    }

    #[test]
    fn programs_of_libpcap_match_what_their_expressions_say() {
        let host = filter(
            "40 0 0 12 21 0 4 2048 32 0 0 26 21 8 0 3325256711 32 0 0 30 21 6 7 3325256711 21 1 0 2054 21 0 5 32821 32 0 0 28 \
             21 2 0 3325256711 32 0 0 38 21 0 1 3325256711 6 0 0 262144 6 0 0 0",
        );
        let port = filter(
            "40 0 0 12 21 0 6 34525 48 0 0 20 21 0 15 6 40 0 0 54 21 12 0 80 40 0 0 56 21 10 11 80 21 0 10 2048 48 0 0 23 \
             21 0 8 6 40 0 0 20 69 6 0 8191 177 0 0 14 72 0 0 14 21 2 0 80 72 0 0 16 21 0 1 80 6 0 0 262144 6 0 0 0",
        );
        let vlan = filter(
            "40 0 0 12 21 2 0 33024 21 1 0 34984 21 0 22 37120 40 0 0 14 84 0 0 4095 21 0 19 7 40 0 0 16 21 0 6 34525 48 0 0 24 \
             21 0 15 6 40 0 0 58 21 12 0 80 40 0 0 60 21 10 11 80 21 0 10 2048 48 0 0 27 21 0 8 6 40 0 0 24 69 6 0 8191 177 0 0 18 \
             72 0 0 18 21 2 0 80 72 0 0 20 21 0 1 80 6 0 0 262144 6 0 0 0",
        );
        let long_syn = filter(
            "40 0 0 12 21 0 10 2048 48 0 0 23 21 0 8 6 40 0 0 20 69 6 0 8191 177 0 0 14 80 0 0 27 69 0 3 2 128 0 0 0 37 0 1 60 \
             6 0 0 262144 6 0 0 0",
        );
        let header =
            filter("40 0 0 12 21 0 7 2048 40 0 0 20 69 5 0 8191 48 0 0 14 84 0 0 15 100 0 0 2 21 0 1 20 6 0 0 1 6 0 0 0");
        let web = Packet::tcp("198.51.100.7:5555", "192.0.2.100:80").build();
        let web6 = Packet::tcp("[2001:db8::7]:5555", "[2001:db8::1:0]:80").build();
        let dns = Packet::udp("198.51.100.8:53", "192.0.2.100:5353").build();
        // Frame; host 198.51.100.7; tcp port 80; vlan 7 and tcp port 80; an IPv4 header of 20 bytes, no later fragment.
        let rows = [
            (web.clone(), [true, true, false, true]),
            (web6, [false, true, false, false]),
            (dns, [false, false, false, true]),
            (tagged(&web, 7), [false, false, true, false]),
            (tagged(&web, 8), [false, false, false, false]),
            (web[..20].to_vec(), [false; 4]),
            (Vec::new(), [false; 4]),
        ];
        for (frame, expected) in rows {
            assert_eq!([&host, &port, &vlan, &header].map(|filter| filter.matches(&frame)), expected, "{frame:02x?}");
        }
        let padded = [web.clone(), vec![0; 20]].concat();
        assert_eq!((long_syn.matches(&padded), long_syn.matches(&web[..54])), (true, false), "SYNs of more than 60 bytes");
        assert!(PacketFilter::new(&[]).unwrap().matches(&[]), "no filter: every frame");
    }

    #[test]
    fn a_program_that_is_not_bounded_or_not_bpf_is_refused() {
        let of = |text: &str| PacketFilter::new(&program(text)).unwrap_err();
        assert_eq!(of("40 0 0 12"), FilterError::NoReturn);
        assert_eq!(of("5 0 0 4294967295 6 0 0 1"), FilterError::Jump(0), "backwards");
        assert_eq!(of("21 0 1 7 6 0 0 1"), FilterError::Jump(0), "one branch leads behind the end");
        assert_eq!(of("5 0 0 1 6 0 0 1"), FilterError::Jump(0));
        for bad in
            ["52 0 0 0", "148 0 0 0", "100 0 0 32", "96 0 0 16", "2 0 0 16", "3 0 0 99", "296 0 0 0", "65535 0 0 0", "14 0 0 0"]
        {
            let error = of(&format!("{bad} 6 0 0 1"));
            assert!(matches!(error, FilterError::Instruction { at: 0, .. }), "{bad}: {error}");
        }
        let long = vec![FilterInstruction { code: 6, ..FilterInstruction::default() }; FILTER_INSTRUCTIONS_MAX + 1];
        assert!(PacketFilter::new(&long).unwrap_err().to_string().contains("has 1025 instructions, at most 1024"));
        assert!(!filter("1 0 0 0 60 0 0 0 6 0 0 1").matches(&[0; 60]), "a division by 0 at run time: no match");
    }

    proptest! {
        #[test]
        fn whatever_is_accepted_ends_and_reads_nothing_else(
            instructions in prop::collection::vec((any::<u16>(), 0..8_u8, 0..8_u8, prop_oneof![0..80_u32, any::<u32>()]), 0..40),
            frame in prop::collection::vec(any::<u8>(), 0..80),
        ) {
            let codes = [0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x07, 0x0c, 0x15, 0x1d, 0x20, 0x25, 0x28, 0x30, 0x3c, 0x40, 0x48, 0x54];
            let codes = [&codes[..], &[0x60, 0x61, 0x64, 0x6c, 0x74, 0x80, 0x84, 0x87, 0x9c, 0xa4, 0xb1, 0x45]].concat();
            let mut program: Vec<_> = instructions
                .into_iter()
                .map(|(code, jump_true, jump_false, value)| FilterInstruction {
                    code: codes[usize::from(code) % codes.len()], jump_true, jump_false, value,
                })
                .collect();
            program.push(FilterInstruction { code: 6, value: 1, ..FilterInstruction::default() });
            if let Ok(filter) = PacketFilter::new(&program) {
                let _ = filter.matches(&frame);
            }
        }
    }
}
