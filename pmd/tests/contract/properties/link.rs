use wirepath_packet::Batch;
use wirepath_pmd::port::{LinkState, PortEvent};
use wirepath_testlab::eventually;

use crate::bench::{Bench, TIMEOUT, frames};

/// The link goes down and up. The port reports both, survives transmits in between, and then continues.
pub(crate) fn goes_down_and_comes_back(bench: &mut Bench) {
    bench.start(&[]);
    assert!(eventually(TIMEOUT, || bench.started().port.link().state == LinkState::Up), "up at the start");
    let _ = bench.started().port.events();
    bench.assert_exchanges(&frames(0..100));

    bench.wire.set_link(false);
    wait_for(bench, LinkState::Down);
    let mut batch: Batch = frames(0..32).iter().map(|frame| bench.packet(frame)).collect();
    for _ in 0..100 {
        let it = bench.started();
        it.tx[0].transmit(&mut batch);
        it.tx[0].reclaim();
    }
    drop(batch);
    let _ = bench.poll();

    bench.wire.set_link(true);
    wait_for(bench, LinkState::Up);
    // Packets accepted while the link was down may still be sent, or lost.
    std::thread::sleep(std::time::Duration::from_millis(100));
    bench.take_arrived();
    bench.arrived.clear();
    bench.assert_exchanges(&frames(1000..1200));
}

/// Waits for an event with this state, and checks the state itself.
fn wait_for(bench: &mut Bench, state: LinkState) {
    let port = &mut bench.started().port;
    let reported = eventually(TIMEOUT, || {
        port.events().iter().any(|event| matches!(event, PortEvent::Link(link) if link.state == state))
    });
    assert!(reported, "no event says that the link is {state:?}");
    assert_eq!(port.link().state, state);
}
