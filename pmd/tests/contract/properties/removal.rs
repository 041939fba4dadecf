use wirepath_packet::Batch;
use wirepath_pmd::port::{PortEvent, StartedPort};
use wirepath_testlab::eventually;

use crate::bench::{Bench, TIMEOUT, frames};

/// The device is removed while the port runs. An event names it, its queues stay safe, its buffers return,
/// and another port continues.
pub(crate) fn says_so_and_others_go_on(bench: &mut Bench) {
    let mut other = Bench::new(bench.wire.second_device());
    bench.start(&[]);
    other.start(&[]);
    bench.assert_exchanges(&frames(0..100));
    other.assert_exchanges(&frames(0..100));

    let name = bench.wire.remove();
    let mut report = None;
    eventually(TIMEOUT, || {
        // Like a worker, keep polling the queues.
        let mut batch: Batch = frames(0..4).iter().map(|frame| bench.packet(frame)).collect();
        let it = bench.started();
        it.tx[0].transmit(&mut batch);
        let mut batch = Batch::new();
        it.rx[0].receive(&mut batch);
        report = it.port.events().into_iter().find_map(|event| match event {
            PortEvent::Lost(text) => Some(text),
            _ => None,
        });
        report.is_some()
    });
    let report = report.unwrap_or_else(|| panic!("nothing says that '{name}' is gone"));
    assert!(report.contains(&name), "'{name}' is not named in: {report}");
    other.assert_exchanges(&frames(200..400));

    for _ in 0..100 {
        let mut batch: Batch = frames(0..4).iter().map(|frame| bench.packet(frame)).collect();
        let it = bench.started();
        it.tx[0].transmit(&mut batch);
        batch.clear();
        it.rx[0].receive(&mut batch);
    }
    let StartedPort { port, rx, tx } = bench.port.take().expect("started");
    // The device is gone, so the stop may report an error.
    drop(port.stop(rx, tx));
    assert_eq!(bench.pool.outstanding(), 0, "buffers that did not come back");
    other.assert_exchanges(&frames(500..600));
    other.stop();
}
