//! A buffer of limited capacity for unit tests of code that changes packets in place, and the parsed headers of frames.

use crate::wire::{Buffer, Headers, Parsed, parse};

/// A buffer with a capacity that the test chooses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bytes {
    pub(crate) frame: Vec<u8>,
    pub(crate) room: usize,
}

impl Bytes {
    pub(crate) fn new(frame: Vec<u8>) -> Self {
        Self { frame, room: 2048 }
    }
}

impl Buffer for Bytes {
    fn bytes(&self) -> &[u8] {
        &self.frame
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.frame
    }

    fn resize(&mut self, len: usize) -> bool {
        let fits = len <= self.room;
        if fits {
            self.frame.resize(len, 0xa5);
        }
        fits
    }

    fn prepend(&mut self, len: usize) -> bool {
        let fits = self.frame.len() + len <= self.room;
        if fits {
            self.frame.splice(..0, std::iter::repeat_n(0xa5, len));
        }
        fits
    }

    fn trim_front(&mut self, len: usize) {
        self.frame.drain(..len.min(self.frame.len()));
    }
}

pub(crate) fn v4(frame: &[u8]) -> Headers<u32> {
    match parse(frame) {
        Ok(Parsed::V4(headers)) => headers,
        other => panic!("expected IPv4, found {other:?}"),
    }
}

pub(crate) fn v6(frame: &[u8]) -> Headers<u128> {
    match parse(frame) {
        Ok(Parsed::V6(headers)) => headers,
        other => panic!("expected IPv6, found {other:?}"),
    }
}
