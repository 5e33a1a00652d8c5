use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

/// All randomness of one world: the same seed makes the same world.
pub(super) struct Dice(StdRng);

impl Dice {
    pub(super) fn new(seed: u64) -> Self {
        Self(StdRng::seed_from_u64(seed))
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        self.0.random_range(0..n)
    }

    /// True in so many of a hundred cases.
    pub(super) fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub(super) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// Each with the same chance.
    pub(super) fn some<T: Clone>(&mut self, percent: usize, from: &[T]) -> Vec<T> {
        from.iter().filter(|_| self.chance(percent)).cloned().collect()
    }

    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for n in (1..items.len()).rev() {
            items.swap(n, self.below(n + 1));
        }
    }
}
