use crate::bench::{Bench, frames};

/// Below the capacity of the wire, all frames arrive once and in order, in both directions.
pub(crate) fn in_order_without_loss(bench: &mut Bench) {
    let frames = frames(0..3000);
    bench.start(&frames);
    bench.assert_exchanges(&frames);
}
