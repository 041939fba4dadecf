//! Additions of an application to the runtime: drop reasons, counters and commands of its own.

use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, Packet, Pool, PortId};
use wirepath_pipeline::observe::{CaptureSpec, Point};
use wirepath_pipeline::registry::{MetricsFormat, MetricsText, Registry, Row, Unit};
use wirepath_pipeline::{Context, CounterId, Running};
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

#[test]
fn counters_appear_summed_and_by_worker() {
    let frames = CounterId::register("test_frames", Unit::Packets, "Frames of the test").unwrap();
    let bytes = CounterId::register("test_bytes", Unit::Bytes, "Bytes of the test").unwrap();
    let unused = CounterId::register("test_unused", Unit::None, "Nothing").unwrap();
    let pool = Pool::new("test", 2048).unwrap();
    let (runtime, mut a, mut b) = cables("counters", 2, &pool);
    let mut running = runtime
        .start(|_| {
            move |context: &mut Context<'_>, batch: &mut Batch| {
                context.count(frames, batch.len() as u64);
                batch.iter().for_each(|packet| context.count(bytes, packet.len() as u64));
                context.send_batch(context.in_port().expect("nothing is handed over").paired(), batch);
            }
        })
        .unwrap();
    // Worker 0 receives from port a, worker 1 from port b.
    assert!((0..30).all(|n| a.send_bytes(&frame(n))) && (0..7).all(|n| b.send_bytes(&frame(n))));
    wait_until(|| running.plane().counter(bytes) == 37 * 64);
    running.plane().count(frames, 5);

    let rows_of = |running: &mut Running<_>, table: &str| -> Vec<Row> {
        rows(running, table).into_iter().filter(|row| row[0].as_str().unwrap().starts_with("test_")).collect()
    };
    let found = rows_of(&mut running, "counters");
    assert!(found.contains(&vec!["test_frames".into(), 42.into(), "packets".into(), "Frames of the test".into()]));
    assert!(found.contains(&vec!["test_unused".into(), 0.into(), "".into(), "Nothing".into()]));
    let found = rows_of(&mut running, "worker_counters");
    let values = |name: &str| -> Vec<_> {
        found.iter().filter(|row| row[0] == name).map(|row| (row[1].to_string(), row[2].as_u64().unwrap())).collect()
    };
    let places =
        |values: [u64; 3]| ["0", "1", "\"control\""].map(str::to_owned).into_iter().zip(values).collect::<Vec<_>>();
    assert_eq!(values("test_frames"), places([30, 7, 5]));
    assert_eq!(values("test_bytes"), places([30 * 64, 7 * 64, 0]));

    let metrics = metrics(&mut running);
    let family = "# TYPE wirepath_app_test_frames counter\n# HELP wirepath_app_test_frames Frames of the test\n\
        wirepath_app_test_frames_total{worker=\"0\"} 30\nwirepath_app_test_frames_total{worker=\"1\"} 7\n\
        wirepath_app_test_frames_total{worker=\"control\"} 5\n";
    assert!(metrics.contains(family), "{metrics}");
    assert!(metrics.contains("# UNIT wirepath_app_test_bytes bytes\n"), "{metrics}");

    let summary = stop(running);
    assert_eq!(summary.counters()[&frames], 42);
    let text = summary.to_string();
    assert!(text.contains("  counted 42 packets: Frames of the test (test_frames)\n"), "{text}");
    assert!(text.contains("  counted 2368 bytes: Bytes of the test (test_bytes)\n"), "{text}");
    assert!(summary.counters()[&unused] == 0 && !text.contains("test_unused"), "{text}");
    let json = summary.to_json();
    assert_eq!((&json["counters"]["test_frames"], &json["counters"]["test_unused"]), (&42.into(), &0.into()));
    assert_eq!(json["workers"][1]["counters"]["test_frames"], 7);
}
