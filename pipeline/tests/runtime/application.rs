//! What an application adds to the runtime: drop reasons of its own.

use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, Packet, Pool, PortId};
use wirepath_pipeline::observe::{CaptureSpec, Point};
use wirepath_pipeline::registry::{MetricsFormat, MetricsText, Registry, Row};
use wirepath_pipeline::{Context, Running};
use wirepath_wire::Parser;

use super::programs::{cables, frame, number, stop, wait_until};

const B: PortId = PortId::new(1);

/// Returns the rows of a table.
fn rows<S>(running: &mut Running<S>, table: &str) -> Vec<Row> {
    let mut registry = Registry { control: &mut (), plane: running.plane() };
    let table = registry.table(table).unwrap();
    registry.rows(table)
}

/// Returns the text of the metrics.
fn metrics<S>(running: &mut Running<S>) -> String {
    let mut registry = Registry { control: &mut (), plane: running.plane() };
    let mut text = MetricsText::new(MetricsFormat::OpenMetrics, &mut registry, &[]);
    let mut out = String::new();
    while text.next_part(&mut registry, &mut out) {}
    out
}

#[test]
fn reasons_of_the_application_appear_like_built_in_ones() {
    let odd = DropReason::register("odd_number", "the frame has an odd number").unwrap();
    let pool = Pool::new("test", 2048).unwrap();
    let (runtime, mut a, mut b) = cables("reasons", 1, &pool);
    let spec = CaptureSpec {
        rx: false,
        tx: false,
        drops: true,
        reason: Some(odd),
        port: None,
        pattern: None,
        snap: 64,
        rate: None,
    };
    let mut reader = runtime.start_capture(spec, Parser::default()).unwrap();
    let mut running = runtime
        .start(|_| {
            move |context: &mut Context<'_>, batch: &mut Batch| {
                batch.filter_map(|mut packet: Packet| match number(&packet) {
                    n if n % 2 == 1 => {
                        context.drop(packet, odd);
                        None
                    }
                    n if n % 10 == 0 => {
                        context.drop(packet, DropReason::RuleDrop);
                        None
                    }
                    _ => {
                        packet.set_out_port(B);
                        Some(packet)
                    }
                });
            }
        })
        .unwrap();
    assert!((0..100).all(|n| a.send_bytes(&frame(n))));
    let mut sent = 0;
    wait_until(|| {
        sent += usize::from(b.receive().is_some());
        sent == 40
    });
    running.plane().count_drops(odd, 3);

    let rows: Vec<Row> = rows(&mut running, "drops").into_iter().filter(|row| row[3] == "odd_number").collect();
    let row = |place: &str, packets: u64| (place.into(), packets.into(), "the frame has an odd number".into());
    let found: Vec<_> = rows.iter().map(|row| (row[0].clone(), row[4].clone(), row[5].clone())).collect();
    assert_eq!(found, [row("worker", 50), row("control", 3)]);
    let metrics = metrics(&mut running);
    let sample = "\nwirepath_drop_packets_total{place=\"worker\",name=\"0\",queue=\"\",reason=\"odd_number\"} 50\n";
    assert!(metrics.contains(sample), "{metrics}");

    let summary = stop(running);
    assert_eq!(summary.drops()[&odd], 53);
    assert_eq!(summary.drops()[&DropReason::RuleDrop], 10);
    assert!(summary.to_string().contains("  dropped 53: the frame has an odd number (odd_number)\n"), "{summary}");
    assert_eq!(summary.to_json()["drops"]["odd_number"], 53);
    let mut captured = Vec::new();
    while let Some(point) = reader.read_next(|packet| packet.point) {
        captured.push(point);
    }
    assert_eq!(captured, vec![Point::Drop(odd); 50]);
}
