//! The Mersenne Twister, which PyTorch uses for random numbers on the CPU.

/// Words of state.
const N: usize = 624;
/// Offset of the word that a new word is mixed with.
const M: usize = 397;

/// MT19937 (Matsumoto and Nishimura, 1998), seeded as `init_genrand` does.
#[derive(Clone)]
pub(super) struct Mersenne {
    state: Box<[u32; N]>,
    next: usize,
}

impl Mersenne {
    pub(super) fn new(seed: u32) -> Self {
        let mut state = Box::new([0; N]);
        state[0] = seed;
        for i in 1..N {
            let last = state[i - 1];
            state[i] = 1812433253u32.wrapping_mul(last ^ (last >> 30)).wrapping_add(i as u32);
        }
        Self { state, next: N }
    }

    pub(super) fn next(&mut self) -> u32 {
        if self.next == N {
            self.refill();
        }
        let mut word = self.state[self.next];
        self.next += 1;
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c_5680;
        word ^= (word << 15) & 0xefc6_0000;
        word ^ (word >> 18)
    }

    fn refill(&mut self) {
        for i in 0..N {
            let mixed = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % N] & 0x7fff_ffff);
            let twist = if mixed & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[i] = self.state[(i + M) % N] ^ (mixed >> 1) ^ twist;
        }
        self.next = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::Mersenne;

    /// The 1st and the 10,000th number of C++'s `std::mt19937` with its default seed; the standard gives the latter.
    #[test]
    fn numbers_are_those_of_the_standard() {
        let mut engine = Mersenne::new(5489);
        assert_eq!(engine.next(), 3499211612);
        for _ in 1..9999 {
            engine.next();
        }
        assert_eq!(engine.next(), 4123659995);
    }
}
