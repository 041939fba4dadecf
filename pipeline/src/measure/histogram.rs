/// Buckets for each power of two.
const STEPS: usize = 4;
/// Number of buckets, for values up to 2³².
const BUCKETS: usize = 31 * STEPS + 1;

/// A histogram of whole numbers. Numbers below 4 have buckets of their own. The buckets
/// of larger ones are a quarter of a power of two wide. So percentiles are at most a quarter too large.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
    counts: [u64; BUCKETS],
    sum: u64,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: [0; BUCKETS], sum: 0, max: 0 }
    }
}

impl Histogram {
    /// Returns the index of the bucket of a value.
    fn bucket(value: u64) -> usize {
        if value < STEPS as u64 {
            return value as usize;
        }
        let power = value.ilog2() as usize;
        let step = (value >> (power - 2)) as usize & (STEPS - 1);
        ((power - 1) * STEPS + step).min(BUCKETS - 1)
    }

    /// Returns the largest value of a bucket.
    fn last_of(bucket: usize) -> u64 {
        match bucket {
            0..STEPS => bucket as u64,
            bucket if bucket == BUCKETS - 1 => u64::MAX,
            _ => {
                let (power, step) = (bucket / STEPS + 1, bucket % STEPS);
                ((STEPS + step + 1) as u64) << (power - 2)
            }
            .wrapping_sub(1),
        }
    }

    /// Adds a value.
    pub fn add(&mut self, value: u64) {
        self.counts[Self::bucket(value)] += 1;
        self.sum = self.sum.saturating_add(value);
        self.max = self.max.max(value);
    }

    /// Adds the values of another histogram.
    pub fn append(&mut self, other: &Self) {
        for (own, others) in self.counts.iter_mut().zip(&other.counts) {
            *own += others;
        }
        self.sum = self.sum.saturating_add(other.sum);
        self.max = self.max.max(other.max);
    }

    /// Number of values.
    pub fn len(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns true if there is no value.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Mean value; `None` without values.
    pub fn mean(&self) -> Option<f64> {
        let n = self.len();
        (n > 0).then(|| self.sum as f64 / n as f64)
    }

    /// Largest value; 0 without values.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// Returns the value that at least this share of all values does not exceed; `None` without values.
    pub fn percentile(&self, percent: f64) -> Option<u64> {
        let n = self.len();
        let wanted = ((percent / 100.0 * n as f64).ceil() as u64).clamp(1, n.max(1));
        let mut seen = 0;
        let bucket = self.counts.iter().position(|count| {
            seen += count;
            seen >= wanted
        })?;
        Some(Self::last_of(bucket).min(self.max))
    }

    /// Iterates over the buckets with values: their largest values and numbers of values.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> {
        let filled = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        filled.map(|(bucket, count)| (Self::last_of(bucket).min(self.max), *count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_each_other() {
        let mut before = 0;
        for value in (0..100_000).chain((17..32).map(|power| 1 << power)).chain([u64::from(u32::MAX), u64::MAX]) {
            let bucket = Histogram::bucket(value);
            assert!(bucket >= before && bucket < BUCKETS, "{value}");
            assert!(Histogram::last_of(bucket) >= value, "{value}");
            assert!(bucket == 0 || Histogram::last_of(bucket - 1) < value, "{value}");
            before = bucket;
        }
    }

    #[test]
    fn percentiles_are_close() {
        let mut random = fastrand::Rng::with_seed(7);
        let value = |_| {
            let power = random.u32(1..30);
            random.u64(..1 << power)
        };
        let mut values: Vec<u64> = (0..10_000).map(value).collect();
        let (mut one, mut other) = (Histogram::default(), Histogram::default());
        for (i, value) in values.iter().enumerate() {
            if i % 3 == 0 { one.add(*value) } else { other.add(*value) }
        }
        one.append(&other);
        values.sort_unstable();
        assert_eq!((one.len(), one.max()), (10_000, values[9999]));
        assert!((one.mean().unwrap() - values.iter().sum::<u64>() as f64 / 10_000.0).abs() < 0.01);
        for percent in [1.0, 50.0, 90.0, 99.0, 99.9, 100.0] {
            let exact = values[(percent / 100.0 * 10_000.0_f64).ceil() as usize - 1];
            let found = one.percentile(percent).unwrap();
            assert!(found >= exact && found <= exact + exact / 4 + 1, "{percent}: {found}, {exact}");
        }
        assert_eq!((Histogram::default().percentile(50.0), Histogram::default().mean()), (None, None));
        assert_eq!(one.buckets().map(|(_, count)| count).sum::<u64>(), 10_000);
    }
}
