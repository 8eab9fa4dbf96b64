//! A token bucket in one word, for rate limits.
//!
//! Not here: the packets that are limited (`twin_rate`, `icmp::limiter`).

/// Burst size of a tenth of a second: a token may be taken this much earlier than the rate allows.
const BURST_NS: u64 = 100_000_000;

/// A token bucket as one number: the time when it is full again. A new one is full.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TokenBucket {
    full_at_ns: u64,
}

impl TokenBucket {
    /// The bucket after one more token is taken; `None` when it is empty. An idle bucket always has its first token.
    #[inline]
    pub(crate) fn after_one(self, now_ns: u64, per_second: u32) -> Option<Self> {
        let full_at_ns = self.full_at_ns.max(now_ns);
        let token_ns = 1_000_000_000 / u64::from(per_second);
        (full_at_ns - now_ns <= BURST_NS - token_ns).then_some(Self { full_at_ns: full_at_ns + token_ns })
    }
}
