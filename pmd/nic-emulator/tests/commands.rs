//! The device alone, in plain memory: commands in the write form as libibverbs 44 sends them, descriptors and
//! doorbells.

use rustix::io::Errno;
use wirepath_nic_defs::mana::{
    self, CqDoorbell, CqeHead, CqeTail, RqDoorbell, RxFlags, SqDoorbell, TxOob, TxOob1, WqeFlags,
};
use wirepath_nic_defs::uverbs::{ACCESS_LOCAL_WRITE, QPT_RAW_PACKET, mana as abi, write};
use wirepath_nic_emulator::mem_host::{self, BASE, EmulatorHarness, write_command};
use zerocopy::{FromZeros, IntoBytes};

/// Addresses of commands and replies; rings and buffers follow.
const COMMAND: u64 = BASE;
const REPLY: u64 = BASE + 0x1000;
const SQ: u64 = BASE + 0x2000;
const SEND_CQ: u64 = BASE + 0x4000;
const RQ: u64 = BASE + 0x6000;
const RECEIVE_CQ: u64 = BASE + 0x8000;
const BUFFERS: u64 = BASE + 0x1_0000;

const LOOP: &str = "[[device]]\nkind = 'mana'\n[[device.port]]\nlink = 'loop'\n";

/// Builds an extended command with its driver part.
fn extended_write_command(command: u32, core: &[u8], driver: &[u8], reply: usize, driver_reply: usize) -> Vec<u8> {
    mem_host::extended_write_command(REPLY, command, core, driver, reply, driver_reply)
}

fn get_context() -> Vec<u8> {
    write_command(write::GET_CONTEXT, REPLY.as_bytes(), &[], 8)
}

fn alloc_pd() -> Vec<u8> {
    write_command(write::ALLOC_PD, REPLY.as_bytes(), &[], 4)
}

fn reg_mr(pd: u32, start: u64, length: u64, access: u32) -> Vec<u8> {
    let core = write::RegMr { response: REPLY, start, length, hca_va: start, pd_handle: pd, access_flags: access };
    write_command(write::REG_MR, core.as_bytes(), &[], 12)
}

fn create_cq(ring: u64, entries: u32) -> Vec<u8> {
    let core = write::CreateCq {
        response: REPLY,
        user_handle: 7,
        cqe: entries,
        comp_vector: 0,
        comp_channel: -1,
        reserved: 0,
    };
    write_command(write::CREATE_CQ, core.as_bytes(), ring.as_bytes(), 8)
}

fn create_qp(pd: u32, cq: u32, ring: u64, port: u32) -> Vec<u8> {
    let core = write::CreateQp {
        response: REPLY,
        pd_handle: pd,
        send_cq_handle: cq,
        recv_cq_handle: cq,
        max_send_wr: 64,
        max_send_sge: 4,
        qp_type: QPT_RAW_PACKET as u8,
        ..write::CreateQp::new_zeroed()
    };
    let driver = abi::CreateQp { sq_buf_addr: ring, sq_buf_size: 8192, port };
    write_command(write::CREATE_QP, core.as_bytes(), driver.as_bytes(), 32 + 16)
}

fn create_wq(pd: u32, cq: u32, ring: u64) -> Vec<u8> {
    let core =
        write::CreateWq { pd_handle: pd, cq_handle: cq, max_wr: 64, max_sge: 2, ..write::CreateWq::new_zeroed() };
    let driver = abi::CreateWq { wq_buf_addr: ring, wq_buf_size: 8192, reserved: 0 };
    extended_write_command(write::CREATE_WQ, core.as_bytes(), driver.as_bytes(), 24, 0)
}

fn create_table(wq: u32) -> Vec<u8> {
    let core = [0u32, 0, wq, 0];
    extended_write_command(write::CREATE_RWQ_IND_TBL, core.as_bytes(), &[], 16, 0)
}

fn create_rss_qp(pd: u32, table: u32) -> Vec<u8> {
    let core = write::ExtendedCreateQp {
        pd_handle: pd,
        qp_type: QPT_RAW_PACKET as u8,
        comp_mask: write::CREATE_QP_MASK_IND_TABLE,
        rwq_ind_tbl_handle: table,
        ..write::ExtendedCreateQp::new_zeroed()
    };
    let driver = abi::CreateRssQp {
        rx_hash_fields_mask: 0xff,
        rx_hash_function: abi::HASH_TOEPLITZ,
        reserved: [0; 7],
        rx_hash_key_len: 40,
        rx_hash_key: [0x6d; 40],
        port: 1,
    };
    extended_write_command(write::CREATE_QP, core.as_bytes(), driver.as_bytes(), 40, 520)
}

/// Returns the commands of a driver before its first packet. The handles are 0, 1, 2 and so on.
fn setup() -> Vec<Vec<u8>> {
    vec![
        get_context(),
        alloc_pd(),                                       // 0
        reg_mr(0, BUFFERS, 0x8_0000, ACCESS_LOCAL_WRITE), // 1
        create_cq(SEND_CQ, 64),                           // 2
        create_qp(0, 2, SQ, 1),                           // 3
        create_cq(RECEIVE_CQ, 64),                        // 4
        create_wq(0, 4, RQ),                              // 5
        create_table(5),                                  // 6
        create_rss_qp(0, 6),                              // 7
    ]
}

struct Numbers {
    key: u32,
    sq: u32,
    send_cq: u32,
    vport: u32,
    rq: u32,
    receive_cq: u32,
}

fn words(harness: &EmulatorHarness, at: u64, count: usize) -> Vec<u32> {
    harness.peek(at, 4 * count).chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

fn ready(topology: &str) -> (EmulatorHarness, Numbers) {
    let harness = EmulatorHarness::new(topology);
    let numbers = set_up(&harness);
    (harness, numbers)
}

fn set_up(harness: &EmulatorHarness) -> Numbers {
    let mut replies = Vec::new();
    for command in setup() {
        harness.write(COMMAND, &command).unwrap_or_else(|errno| panic!("{errno}: {:?}", harness.emulator.log().last()));
        replies.push(words(harness, REPLY, 16));
    }
    // The driver reply follows the core reply of 32 bytes (queue pair) or 40 bytes (extended form).
    let (mr, qp, rss) = (&replies[2], &replies[4], &replies[8]);
    Numbers { key: mr[1], sq: qp[8], send_cq: qp[9], vport: qp[10], receive_cq: rss[12], rq: rss[13] }
}

fn sge(address: u64, key: u32, size: u32) -> Vec<u8> {
    [&address.to_le_bytes()[..], &key.to_le_bytes(), &size.to_le_bytes()].concat()
}

fn post_receive(harness: &EmulatorHarness, numbers: &Numbers, index: u64, sges: &[Vec<u8>]) {
    let flags = WqeFlags::default().with_sges(sges.len() as u32).with_oob_words(mana::OOB_WORDS_SHORT);
    let wqe = [&[0; 4][..], &flags.0.to_le_bytes(), &[0; 8], &sges.concat()].concat();
    harness.poke(RQ + index * 32, &wqe);
    let units = u64::from(mana::wqe_units(mana::OOB_SHORT, sges.len() as u32));
    harness.ring_doorbell(
        mana::DOORBELL_RQ,
        RqDoorbell::default().with_id(numbers.rq.into()).with_tail((index + units) * 32).0,
    );
}

fn post_send(harness: &EmulatorHarness, numbers: &Numbers, index: u64, sges: &[Vec<u8>]) {
    let flags = WqeFlags::default().with_sges(sges.len() as u32).with_oob_words(mana::OOB_WORDS_SHORT);
    let oob = TxOob::default().with_vcq(numbers.send_cq);
    let oob1 = TxOob1::default().with_vsq_frame(numbers.sq >> 10).with_vport(numbers.vport);
    let wqe =
        [&[0; 4][..], &flags.0.to_le_bytes(), &oob.0.to_le_bytes(), &oob1.0.to_le_bytes(), &sges.concat()].concat();
    harness.poke(SQ + index * 32, &wqe);
    let units = u64::from(mana::wqe_units(mana::OOB_SHORT, sges.len() as u32));
    harness.ring_doorbell(
        mana::DOORBELL_SQ,
        SqDoorbell::default().with_id(numbers.sq.into()).with_tail((index + units) * 32).0,
    );
}

fn entry(harness: &EmulatorHarness, ring: u64, index: u64) -> (CqeHead, CqeTail, Vec<u32>) {
    let words = words(harness, ring + index * 64, 16);
    (CqeHead(words[0]), CqeTail(words[15]), words)
}

#[test]
fn a_frame_is_looped_back() {
    let (harness, numbers) = ready(LOOP);
    let frame: Vec<u8> = (0..100u8).collect();
    harness.poke(BUFFERS, &frame);
    // Receives into two buffers; the first one is short.
    let buffers = [sge(BUFFERS + 0x1000, numbers.key, 40), sge(BUFFERS + 0x2000, numbers.key, 2000)];
    post_receive(&harness, &numbers, 0, &buffers);
    post_send(&harness, &numbers, 0, &[sge(BUFFERS, numbers.key, 10), sge(BUFFERS + 10, numbers.key, 90)]);
    let (head, tail, _) = entry(&harness, SEND_CQ, 0);
    assert_eq!((head.cqe_type(), tail.owner(), tail.is_sq(), tail.queue()), (mana::CQE_TX_OKAY, 1, 1, numbers.sq));
    let (head, tail, words) = entry(&harness, RECEIVE_CQ, 0);
    assert_eq!((head.cqe_type(), tail.owner(), tail.is_sq(), tail.queue()), (mana::CQE_RX_OKAY, 1, 0, numbers.rq));
    assert_eq!((words[2] & 0xffff, RxFlags(words[1]).vlan_present()), (100, 0));
    assert_eq!([harness.peek(BUFFERS + 0x1000, 40), harness.peek(BUFFERS + 0x2000, 60)].concat(), frame);
}

#[test]
fn without_buffers_frames_are_dropped_and_counted() {
    let (harness, numbers) = ready(LOOP);
    post_send(&harness, &numbers, 0, &[sge(BUFFERS, numbers.key, 60)]);
    let counters = harness.emulator.counters();
    let queue = &counters["devices"][0]["receive_queues"][0];
    assert_eq!((queue["no_buffer"].as_u64(), queue["packets"].as_u64()), (Some(1), Some(0)));
    assert_eq!(counters["devices"][0]["ports"][0]["link"]["refused"], 1);
}

#[test]
fn a_frame_that_does_not_fit_is_truncated() {
    let (harness, numbers) = ready(LOOP);
    post_receive(&harness, &numbers, 0, &[sge(BUFFERS + 0x1000, numbers.key, 64)]);
    post_send(&harness, &numbers, 0, &[sge(BUFFERS, numbers.key, 200)]);
    let (head, _, words) = entry(&harness, RECEIVE_CQ, 0);
    assert_eq!((head.cqe_type(), words[2] & 0xffff), (mana::CQE_RX_TRUNCATED, 64));
}

#[test]
fn a_receive_descriptor_with_a_wrong_key_stops_its_queue() {
    let (harness, numbers) = ready(LOOP);
    post_receive(&harness, &numbers, 0, &[sge(BUFFERS + 0x1000, numbers.key ^ 0x100, 64)]);
    post_send(&harness, &numbers, 0, &[sge(BUFFERS, numbers.key, 60)]);
    let last = harness.emulator.log().last().unwrap();
    assert!(last.contains("no memory region has this key; the queue stops"), "{last}");
    assert_eq!(entry(&harness, RECEIVE_CQ, 0).1.owner(), 0, "no completion");
    assert_eq!(harness.emulator.counters()["devices"][0]["receive_queues"][0]["stopped"], true);
}

#[test]
fn read_only_memory_is_sent_from_but_not_received_into() {
    let (harness, numbers) = ready(LOOP);
    harness.write(COMMAND, &reg_mr(0, BUFFERS, 0x1000, 0)).unwrap();
    let read_only = words(&harness, REPLY, 3)[1];
    post_receive(&harness, &numbers, 0, &[sge(BUFFERS, read_only, 64)]);
    post_send(&harness, &numbers, 0, &[sge(BUFFERS, read_only, 60)]);
    assert_eq!(entry(&harness, SEND_CQ, 0).0.cqe_type(), mana::CQE_TX_OKAY);
    assert!(harness.emulator.log().last().unwrap().contains("not registered for local writes"));
}

#[test]
fn coalesced_completions_share_an_entry() {
    let (harness, numbers) = ready("[[device]]\nkind = 'mana'\ncoalesce = true\n[[device.port]]\nlink = 'loop'\n");
    for index in 0..6 {
        post_receive(&harness, &numbers, index, &[sge(BUFFERS + 0x1000 + 256 * index, numbers.key, 256)]);
    }
    // One doorbell for all descriptors, so that the frames arrive in one burst.
    let flags = WqeFlags::default().with_sges(1).with_oob_words(mana::OOB_WORDS_SHORT);
    let oob = TxOob::default().with_vcq(numbers.send_cq);
    let oob1 = TxOob1::default().with_vsq_frame(numbers.sq >> 10).with_vport(numbers.vport);
    for index in 0..6u64 {
        let sge = sge(BUFFERS, numbers.key, 60 + index as u32);
        let wqe = [&[0; 4][..], &flags.0.to_le_bytes(), &oob.0.to_le_bytes(), &oob1.0.to_le_bytes(), &sge].concat();
        harness.poke(SQ + index * 32, &wqe);
    }
    harness.ring_doorbell(mana::DOORBELL_SQ, SqDoorbell::default().with_id(numbers.sq.into()).with_tail(6 * 32).0);
    let (first, _, words) = entry(&harness, RECEIVE_CQ, 0);
    assert_eq!(first.cqe_type(), mana::CQE_RX_COALESCED_4);
    assert_eq!([2, 5, 8, 11].map(|at| words[at] & 0xffff), [60, 61, 62, 63]);
    let (second, _, words) = entry(&harness, RECEIVE_CQ, 1);
    assert_eq!(second.cqe_type(), mana::CQE_RX_COALESCED_4);
    assert_eq!([2, 5, 8].map(|at| words[at] & 0xffff), [64, 65, 0]);
}

#[test]
fn objects_in_use_cannot_be_destroyed() {
    let (harness, _) = ready(LOOP);
    let dealloc = |pd: u32| write_command(write::DEALLOC_PD, pd.as_bytes(), &[], 0);
    let destroy_wq = |wq: u32| extended_write_command(write::DESTROY_WQ, [0u32, wq].as_bytes(), &[], 16, 0);
    assert_eq!(harness.write(COMMAND, &dealloc(0)), Err(Errno::BUSY));
    assert_eq!(harness.write(COMMAND, &dealloc(1)), Err(Errno::INVAL), "a memory region is no protection domain");
    assert_eq!(harness.write(COMMAND, &dealloc(77)), Err(Errno::NOENT));
    assert_eq!(harness.write(COMMAND, &destroy_wq(5)), Err(Errno::BUSY));
    let destroy_qp = |qp: u32| {
        let core = write::DestroyQp { response: REPLY, qp_handle: qp, reserved: 0 };
        write_command(write::DESTROY_QP, core.as_bytes(), &[], 4)
    };
    harness.write(COMMAND, &destroy_qp(7)).unwrap();
    harness
        .write(COMMAND, &extended_write_command(write::DESTROY_RWQ_IND_TBL, [0u32, 6].as_bytes(), &[], 0, 0))
        .unwrap();
    harness.write(COMMAND, &destroy_wq(5)).unwrap();
    harness.write(COMMAND, &destroy_qp(3)).unwrap();
    // A completion queue can serve only one queue in its lifetime.
    assert_eq!(harness.write(COMMAND, &create_qp(0, 2, SQ, 1)), Err(Errno::INVAL));
    assert!(harness.emulator.log().last().unwrap().contains("create_qp failed"));
}

#[test]
fn one_protection_domain_sends_on_a_port() {
    let (harness, _) = ready(LOOP);
    harness.write(COMMAND, &alloc_pd()).unwrap();
    let pd = words(&harness, REPLY, 1)[0];
    harness.write(COMMAND, &create_cq(BUFFERS, 64)).unwrap();
    let cq = words(&harness, REPLY, 1)[0];
    assert_eq!(harness.write(COMMAND, &create_qp(pd, cq, SQ, 1)), Err(Errno::BUSY));
    assert_eq!(harness.write(COMMAND, &create_qp(0, cq, SQ, 2)), Err(Errno::INVAL), "there is one port");
    harness.write(COMMAND, &create_qp(0, cq, SQ, 1)).unwrap();
}

#[test]
fn injected_faults_happen() {
    let fault = |text: &str| format!("{LOOP}[[fault]]\n{text}\n");
    let (harness, numbers) = ready(&fault("kind = 'completion-error'\ncode = 40\nafter = 1"));
    for index in 0..3 {
        post_send(&harness, &numbers, index, &[sge(BUFFERS, numbers.key, 60)]);
    }
    let types: Vec<u32> = (0..3).map(|index| entry(&harness, SEND_CQ, index).0.cqe_type()).collect();
    assert_eq!(types, [mana::CQE_TX_OKAY, 40, mana::CQE_TX_OKAY]);

    let (harness, numbers) = ready(&fault("kind = 'hostile'\nqueue = 'tx'\nwhat = 'queue'"));
    post_send(&harness, &numbers, 0, &[sge(BUFFERS, numbers.key, 60)]);
    assert_eq!(entry(&harness, SEND_CQ, 0).1.queue(), 0xff_fff0);

    let (harness, _) = ready(LOOP);
    harness.emulator.inject_toml("kind = 'device-fatal'").unwrap();
    assert_eq!(harness.write(COMMAND, &alloc_pd()), Err(Errno::IO), "dead until it is opened anew");
    let again = harness.emulator.open(0).unwrap();
    harness.poke(COMMAND, &get_context());
    let fd = std::os::fd::AsRawFd::as_raw_fd(&again.file);
    assert_eq!(harness.emulator.write(fd, COMMAND, get_context().len()), Ok(16));

    let (harness, _) = ready(LOOP);
    harness.emulator.inject_toml("kind = 'refuse'\ncommand = 'alloc_pd'\nerrno = 'ENOMEM'").unwrap();
    assert_eq!(harness.write(COMMAND, &alloc_pd()), Err(Errno::NOMEM));
    assert!(harness.write(COMMAND, &alloc_pd()).is_ok());
}

#[test]
fn closing_a_stale_context_leaves_newer_objects_alone() {
    let (mut harness, _) = ready(LOOP);
    harness.emulator.inject_toml("kind = 'device-fatal'").unwrap();
    let again = harness.emulator.open(0).unwrap();
    let before = std::mem::replace(&mut harness.fd, std::os::fd::AsRawFd::as_raw_fd(&again.file));
    harness.context = again.context;
    let numbers = set_up(&harness);
    harness.emulator.close(before);
    post_receive(&harness, &numbers, 0, &[sge(BUFFERS + 0x1000, numbers.key, 64)]);
    post_send(&harness, &numbers, 0, &[sge(BUFFERS, numbers.key, 60)]);
    assert_eq!(entry(&harness, RECEIVE_CQ, 0).0.cqe_type(), mana::CQE_RX_OKAY);
}

#[test]
fn arming_and_invalid_tails() {
    let (harness, numbers) = ready(LOOP);
    let bell = |tail: u64| CqDoorbell::default().with_id(numbers.send_cq.into()).with_tail(tail).with_arm(1).0;
    harness.ring_doorbell(mana::DOORBELL_CQ, bell(64));
    let before = harness.emulator.log().lines();
    harness.ring_doorbell(mana::DOORBELL_CQ, bell(65));
    assert_eq!(harness.emulator.log().lines(), before + 1);
    assert!(harness.emulator.log().last().unwrap().contains("leaves 511 entries unread"));
    harness.ring_doorbell(mana::DOORBELL_CQ, CqDoorbell::default().with_id(numbers.receive_cq.into()).with_tail(64).0);
    assert_eq!(harness.emulator.log().lines(), before + 1, "that one is right");
    harness.ring_doorbell(0x123, 1);
    assert!(harness.emulator.log().last().unwrap().contains("is not a doorbell"));
}

/// A driver that reuses a buffer before its completion is detected.
#[test]
fn a_late_fetch_sees_early_reuse_of_buffers() {
    let (harness, numbers) = ready(&format!("fetch = 'late'\n{LOOP}"));
    harness.poke(BUFFERS, &[1; 60]);
    post_receive(&harness, &numbers, 0, &[sge(BUFFERS + 0x1000, numbers.key, 2000)]);
    post_send(&harness, &numbers, 0, &[sge(BUFFERS, numbers.key, 60)]);
    assert_eq!(entry(&harness, SEND_CQ, 0).1.owner(), 0, "nothing yet");
    harness.poke(BUFFERS, &[2; 60]);
    while entry(&harness, SEND_CQ, 0).1.owner() == 0 {
        harness.emulator.serve();
    }
    assert_eq!(harness.peek(BUFFERS + 0x1000, 60), [2; 60]);
}

/// Stores reach a device before a later command does, even with a late fetch. Descriptors whose doorbell was
/// rung before the queue is destroyed are sent without an error.
#[test]
fn queued_doorbells_precede_destruction() {
    for late in ["doorbells = 'queue'\n", "fetch = 'late'\n", "doorbells = 'queue'\nfetch = 'late'\n"] {
        let (harness, numbers) = ready(&format!("{late}{LOOP}"));
        let send = |index: u64| post_send(&harness, &numbers, index, &[sge(BUFFERS + 64 * index, numbers.key, 60)]);
        for index in 0..2 {
            harness.poke(BUFFERS + 64 * index, &[7 + index as u8; 60]);
            let buffer = BUFFERS + 0x1000 * (index + 1);
            post_receive(&harness, &numbers, index, &[sge(buffer, numbers.key, 2000)]);
            send(index);
        }
        assert_eq!(entry(&harness, SEND_CQ, 0).1.owner(), 0, "{late}: nothing yet");
        // A command that stops no queue does not wait for doorbells.
        harness.write(COMMAND, &alloc_pd()).unwrap();
        assert_eq!(entry(&harness, SEND_CQ, 0).1.owner(), 0, "{late}: nothing yet");
        let core = write::DestroyQp { response: REPLY, qp_handle: 3, reserved: 0 };
        harness.write(COMMAND, &write_command(write::DESTROY_QP, core.as_bytes(), &[], 4)).unwrap();
        for index in 0..2 {
            assert_eq!(entry(&harness, SEND_CQ, index).0.cqe_type(), mana::CQE_TX_OKAY, "{late}");
            assert_eq!(harness.peek(BUFFERS + 0x1000 * (index + 1), 60), [7 + index as u8; 60], "{late}");
        }
        while harness.emulator.serve() {}
        assert_eq!(harness.emulator.log().last(), None, "{late}");
        // A doorbell after the destruction is an error.
        send(2);
        while harness.emulator.log().lines() == 0 {
            harness.emulator.serve();
        }
        assert!(harness.emulator.log().last().unwrap().contains("which this context does not have"), "{late}");
    }
}

/// The same seed gives the same losses, and every frame is counted.
#[test]
fn links_apply_their_impairments() {
    let topology = "seed = 9\n[[device]]\nkind = 'mana'\n[[device.port]]\nlink = 'loop'\n\
                    lose = 0.2\nduplicate = 0.1\ncorrupt = 0.1\nreorder = 0.1\n";
    let run = || {
        let (harness, numbers) = ready(topology);
        for index in 0..200u64 {
            harness.poke(BUFFERS, &index.to_le_bytes());
            // The ring has 256 units, more than this loop needs.
            post_send(&harness, &numbers, index, &[sge(BUFFERS, numbers.key, 60)]);
        }
        harness.emulator.counters()["devices"][0]["ports"][0]["link"].clone()
    };
    let link = run();
    assert_eq!(link, run());
    let count = |name: &str| link[name].as_u64().unwrap();
    assert!(
        count("lost") > 20 && count("duplicated") > 5 && count("corrupted") > 5 && count("reordered") > 5,
        "{link}"
    );
    let reached = count("delivered") + count("refused");
    let still_held = 200 - count("lost") + count("duplicated") - reached;
    assert!(still_held <= 1, "{link}: only a frame that waits to be overtaken may be missing");
}

/// Writes seeds for the fuzz targets: `WIREPATH_SEEDS=FOLDER cargo test -p wirepath-nic-emulator --test
/// commands`.
#[test]
fn seeds_for_the_fuzz_targets() {
    let record = |kind: u8, bytes: &[u8]| [&[kind][..], &(bytes.len() as u16).to_le_bytes(), bytes].concat();
    let mut seed: Vec<u8> = setup().iter().flat_map(|command| record(0, command)).collect();
    let (harness, numbers) = ready(LOOP);
    post_receive(&harness, &numbers, 0, &[sge(BUFFERS + 0x1000, numbers.key, 2000)]);
    let poke =
        |address: u64, length| [&((address - BASE) as u32).to_le_bytes()[..], &harness.peek(address, length)].concat();
    post_send(&harness, &numbers, 0, &[sge(BUFFERS, numbers.key, 60)]);
    let bell = |offset: usize, value: u64| [&(offset as u16).to_le_bytes()[..], &value.to_le_bytes()].concat();
    seed.extend(record(2, &poke(RQ, 32)));
    seed.extend(record(1, &bell(mana::DOORBELL_RQ, RqDoorbell::default().with_id(numbers.rq.into()).with_tail(32).0)));
    seed.extend(record(2, &poke(SQ, 32)));
    seed.extend(record(1, &bell(mana::DOORBELL_SQ, SqDoorbell::default().with_id(numbers.sq.into()).with_tail(32).0)));
    assert!(seed.len() > 500);
    if let Some(folder) = std::env::var_os("WIREPATH_SEEDS") {
        std::fs::write(std::path::Path::new(&folder).join("mana_loop"), seed).unwrap();
    }
}
