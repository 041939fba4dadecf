//! Random sequences of steps for a gateway and its reference model.

use wirepath_packet::Pool;

use crate::model;

/// Sequences of each run.
const SEQUENCES: u64 = 2000;

/// Prints the seed of a sequence that fails.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("the seed is {}", self.0);
        }
    }
}

fn run(seed: u64, pool: &Pool) {
    let _printed = Seed(seed);
    let mut random = fastrand::Rng::with_seed(seed);
    let len = random.usize(20..400);
    let data: Vec<u8> = (0..len).map(|_| random.u8(..)).collect();
    model::run(&data, pool);
}

#[test]
fn random_sequences_agree_with_the_model() {
    let pool = model::pool();
    (0..SEQUENCES).for_each(|seed| run(seed, &pool));
}
