//! NumPy's `SeedSequence`, which turns one seed into many independent ones.

/// Derives `N` 32-bit words from a seed and a spawn key.
///
/// Equals `numpy.random.SeedSequence(seed, spawn_key=spawn_key, pool_size=POOL).generate_state(N)`.
pub(super) fn generate_state<const POOL: usize, const N: usize>(seed: u64, spawn_key: &[u64]) -> [u32; N] {
    let mut entropy = words(seed);
    if !spawn_key.is_empty() {
        entropy.resize(entropy.len().max(POOL), 0);
        entropy.extend(spawn_key.iter().flat_map(|key| words(*key)));
    }
    let mut pool = [0u32; POOL];
    let mut hash = Hash { constant: 0x43b0_d7e5, multiplier: 0x931e_8875 };
    for (index, slot) in pool.iter_mut().enumerate() {
        *slot = hash.mix(entropy.get(index).copied().unwrap_or(0));
    }
    for source in 0..POOL {
        for target in 0..POOL {
            if source != target {
                pool[target] = combine(pool[target], hash.mix(pool[source]));
            }
        }
    }
    for word in entropy.into_iter().skip(POOL) {
        for slot in &mut pool {
            *slot = combine(*slot, hash.mix(word));
        }
    }
    let mut hash = Hash { constant: 0x8b51_f9dd, multiplier: 0x58f3_8ded };
    std::array::from_fn(|index| hash.mix(pool[index % POOL]))
}

/// Splits a number into 32-bit words, lowest first. Zero is one word.
fn words(number: u64) -> Vec<u32> {
    match (number as u32, (number >> 32) as u32) {
        (low, 0) => vec![low],
        (low, high) => vec![low, high],
    }
}

struct Hash {
    constant: u32,
    multiplier: u32,
}

impl Hash {
    fn mix(&mut self, value: u32) -> u32 {
        let value = value ^ self.constant;
        self.constant = self.constant.wrapping_mul(self.multiplier);
        let value = value.wrapping_mul(self.constant);
        value ^ (value >> 16)
    }
}

fn combine(x: u32, y: u32) -> u32 {
    let mixed = 0xca01_f9ddu32.wrapping_mul(x).wrapping_sub(0x4973_f715u32.wrapping_mul(y));
    mixed ^ (mixed >> 16)
}

#[cfg(test)]
mod tests {
    use super::generate_state;

    /// The first value is in NumPy's documentation; the others were computed with NumPy.
    #[test]
    fn states_are_those_of_numpy() {
        assert_eq!(generate_state::<4, 4>(42, &[]), [3444837047, 2669555309, 2046530742, 3581440988]);
        assert_eq!(generate_state::<24, 1>(0, &[]), [4025752534]);
        assert_eq!(generate_state::<24, 1>(42, &[]), [387750627]);
        assert_eq!(generate_state::<24, 1>(0, &[0, 0]), [245430115]);
    }
}
