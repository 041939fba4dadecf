//! Firmware commands (DevX) of an emulated ConnectX in plain memory: queues, transport interfaces, and refusals.

use rustix::io::Errno;
use wirepath_nic_defs::mlx5::{
    self as defs, CommandField, create_cq, create_rq, create_rqt, create_sq, create_tir, create_wq, hash_selector,
    header, modify_queue, modify_rqt, modify_tir,
};
use wirepath_nic_defs::uverbs::{ioctl, mlx5 as abi};
use wirepath_nic_emulator::mem_host::{AttributeValue, BASE, Connectx, SEND_BUFFER};

/// Memory of the queues, and the offsets of its parts.
const UMEM: u64 = BASE + 0x9_0000;
const UMEM_BYTES: u64 = 0x4000;
const CQ_RING: u64 = 0;
const RQ_RING: u64 = 0x1000;
const RECORDS: u64 = 0x2000;
const SQ_RING: u64 = 0x3000;
/// Address of the receive buffer.
const BUFFER: u64 = SEND_BUFFER + 0x8000;

fn command(opcode: u16, bytes: usize, fields: &[(CommandField, u64)]) -> Vec<u8> {
    let mut command = vec![0; bytes];
    command[..2].copy_from_slice(&opcode.to_be_bytes());
    fields.iter().for_each(|(field, value)| field.set(&mut command, u128::from(*value)));
    command
}

/// Creates an object; returns its handle and its number.
fn create(nic: &Connectx, command: &[u8]) -> Result<(u32, u64), Errno> {
    let attributes = [
        (abi::DEVX_OBJ_HANDLE, AttributeValue::Handle(0)),
        (abi::DEVX_OBJ_IN, AttributeValue::Bytes(command.to_vec())),
        (abi::DEVX_OBJ_OUT, AttributeValue::Room(16)),
    ];
    let (handles, outputs) = nic.ioctl(abi::OBJECT_DEVX_OBJ, abi::DEVX_OBJ_CREATE, &attributes)?;
    Ok((handles[0], defs::CREATED_NUMBER.get(&outputs[0]) as u64))
}

fn modify(nic: &Connectx, handle: u32, opcode: u16, number: u64, state: u8) -> Result<(), Errno> {
    let fields = [(modify_queue::NUMBER, number), (modify_queue::STATE, u64::from(state))];
    change(nic, handle, command(opcode, modify_queue::BYTES, &fields))
}

/// Changes an object.
fn change(nic: &Connectx, handle: u32, command: Vec<u8>) -> Result<(), Errno> {
    let attributes = [
        (abi::DEVX_OBJ_HANDLE, AttributeValue::Handle(handle)),
        (abi::DEVX_OBJ_IN, AttributeValue::Bytes(command)),
        (abi::DEVX_OBJ_OUT, AttributeValue::Room(16)),
    ];
    nic.ioctl(abi::OBJECT_DEVX_OBJ, abi::DEVX_OBJ_MODIFY, &attributes).map(drop)
}

fn destroy(nic: &Connectx, handle: u32) -> Result<(), Errno> {
    let attributes = [(abi::DEVX_OBJ_HANDLE, AttributeValue::Handle(handle))];
    nic.ioctl(abi::OBJECT_DEVX_OBJ, abi::DEVX_OBJ_DESTROY, &attributes).map(drop)
}

/// Registers the memory of the queues; returns its number.
fn register(nic: &Connectx) -> u64 {
    let attributes = [
        (abi::UMEM_REG_HANDLE, AttributeValue::Handle(0)),
        (abi::UMEM_REG_ADDRESS, AttributeValue::Number(UMEM)),
        (abi::UMEM_REG_LENGTH, AttributeValue::Number(UMEM_BYTES)),
        (abi::UMEM_REG_NUMBER, AttributeValue::Room(4)),
    ];
    let (_, outputs) = nic.ioctl(abi::OBJECT_DEVX_UMEM, abi::UMEM_REG, &attributes).unwrap();
    u64::from(u32::from_ne_bytes(outputs[0][..4].try_into().unwrap()))
}

fn cq(umem: u64) -> Vec<u8> {
    let fields = [
        (create_cq::LOG_ENTRIES, 6),
        (create_cq::RING_UMEM, umem),
        (create_cq::RING_OFFSET, CQ_RING),
        (create_cq::RECORD_UMEM, umem),
        (create_cq::RECORD_OFFSET, RECORDS),
    ];
    command(defs::CREATE_CQ, create_cq::BYTES, &fields)
}

fn rq(umem: u64, cq: u64) -> Vec<u8> {
    let fields = [
        (create_rq::CQ, cq),
        (create_rq::VLAN_STRIP_DISABLE, 1),
        (create_wq::TYPE, u64::from(create_wq::TYPE_CYCLIC)),
        (create_wq::PD, 1),
        (create_wq::LOG_ENTRIES, 6),
        (create_wq::LOG_STRIDE, 4),
        (create_wq::RING_UMEM, umem),
        (create_wq::RING_OFFSET, RQ_RING),
        (create_wq::RECORD_UMEM, umem),
        (create_wq::RECORD_OFFSET, RECORDS + 0x40),
    ];
    command(defs::CREATE_RQ, create_rq::BYTES, &fields)
}

fn sq(umem: u64, cq: u64, tis: u64) -> Vec<u8> {
    let fields = [
        (create_sq::CQ, cq),
        (create_sq::TIS, tis),
        (create_wq::TYPE, u64::from(create_wq::TYPE_CYCLIC)),
        (create_wq::PD, 1),
        (create_wq::LOG_ENTRIES, 6),
        (create_wq::LOG_STRIDE, 6),
        (create_wq::RING_UMEM, umem),
        (create_wq::RING_OFFSET, SQ_RING),
        (create_wq::RECORD_UMEM, umem),
        (create_wq::RECORD_OFFSET, RECORDS + 0x80),
    ];
    command(defs::CREATE_SQ, create_sq::BYTES, &fields)
}

fn rqt(queues: &[u64]) -> Vec<u8> {
    let mut table =
        command(defs::CREATE_RQT, create_rqt::LIST + 4 * queues.len(), &[(create_rqt::ENTRIES, queues.len() as u64)]);
    for (i, number) in queues.iter().enumerate() {
        table[create_rqt::LIST + 4 * i..][..4].copy_from_slice(&(*number as u32).to_be_bytes());
    }
    table
}

fn tir(table: u64) -> Vec<u8> {
    let fields = [
        (create_tir::DISPATCH, 1),
        (create_tir::TABLE, table),
        (create_tir::HASH_FUNCTION, u64::from(create_tir::HASH_TOEPLITZ)),
        (create_tir::OUTER, u64::from(hash_selector::SRC_IP | hash_selector::DST_IP)),
    ];
    command(defs::CREATE_TIR, create_tir::BYTES, &fields)
}

/// Builds a command that changes an object from one that creates it.
fn changing(mut create: Vec<u8>, opcode: u16, number: u64, mask: u64) -> Vec<u8> {
    create[..2].copy_from_slice(&opcode.to_be_bytes());
    modify_queue::NUMBER.set(&mut create, u128::from(number));
    modify_rqt::MASK.set(&mut create, u128::from(mask));
    create
}

/// Builds a UDP packet to 198.18.0.1.
fn frame() -> Vec<u8> {
    let mut frame = vec![0; 60];
    frame[..14].copy_from_slice(&[2, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 9, 8, 0]);
    frame[14..34].copy_from_slice(&[0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 198, 18, 0, 1]);
    frame[34..42].copy_from_slice(&[0, 7, 0, 9, 0, 26, 0, 0]);
    frame
}

#[test]
fn packets_arrive_in_queues_of_firmware_commands() {
    let mut nic = Connectx::new("steering = { devx = true }");
    nic.harness.poke(UMEM + CQ_RING, &[0xf0; 64 * 64]);
    let umem = register(&nic);
    let (cq, cq_number) = create(&nic, &cq(umem)).unwrap();
    let (rq, rq_number) = create(&nic, &rq(umem, cq_number)).unwrap();
    let (table, table_number) = create(&nic, &rqt(&[rq_number, rq_number])).unwrap();
    let (interface, _) = create(&nic, &tir(table_number)).unwrap();
    modify(&nic, rq, defs::MODIFY_RQ, rq_number, defs::QUEUE_RDY).unwrap();
    let segment = [&2048u32.to_be_bytes()[..], &nic.key.to_be_bytes(), &BUFFER.to_be_bytes()].concat();
    nic.harness.poke(UMEM + RQ_RING, &segment);
    nic.harness.poke(UMEM + RECORDS + 0x40, &1u32.to_be_bytes());
    let mut mask = vec![0; 0x40];
    header::DST_IPV4.set(&mut mask, 0xffff_ffff);
    let mut value = vec![0; 0x40];
    header::DST_IPV4.set(&mut value, 0xc612_0001);
    let matcher = nic.matcher(abi::TABLE_NIC_RX, 0, 1, &mask).unwrap();
    let rule = nic.flow(matcher, &value, &[(abi::FLOW_DEST_DEVX, AttributeValue::Handle(interface))]).unwrap();
    nic.send(&frame());
    let entry = nic.harness.peek(UMEM + CQ_RING, 64);
    assert_eq!((entry[63], &entry[0x2c..0x30]), (0x20, &60u32.to_be_bytes()[..]), "{entry:02x?}");
    assert_eq!(nic.harness.peek(BUFFER, 60), frame());
    // Objects that others use stay.
    for used in [cq, rq, interface] {
        assert!(matches!(destroy(&nic, used), Err(Errno::INVAL | Errno::BUSY)));
    }
    nic.ioctl(ioctl::OBJECT_FLOW, abi::FLOW_REMOVE, &[(abi::FLOW_HANDLE, AttributeValue::Handle(rule))]).unwrap();
    for object in [interface, table, rq, cq] {
        assert_eq!(destroy(&nic, object), Ok(()));
    }
}

#[test]
fn tables_and_hashes_of_interfaces_change() {
    let mut nic = Connectx::new("steering = { devx = true }");
    nic.harness.poke(UMEM + CQ_RING, &[0xf0; 64 * 64]);
    let umem = register(&nic);
    let (_, cq_number) = create(&nic, &cq(umem)).unwrap();
    // Rings may share a page.
    let rings = [RQ_RING, RQ_RING + 0x400];
    // Completions name the queue by its user index.
    let queues = [0, 1].map(|i| {
        let mut command = rq(umem, cq_number);
        create_rq::USER_INDEX.set(&mut command, 7 + u128::from(i));
        create_wq::RING_OFFSET.set(&mut command, u128::from(rings[i as usize]));
        create_wq::RECORD_OFFSET.set(&mut command, u128::from(RECORDS + 0x40 + 0x80 * i));
        let (handle, number) = create(&nic, &command).unwrap();
        modify(&nic, handle, defs::MODIFY_RQ, number, defs::QUEUE_RDY).unwrap();
        let segment = [&2048u32.to_be_bytes()[..], &nic.key.to_be_bytes(), &BUFFER.to_be_bytes()].concat();
        nic.harness.poke(UMEM + rings[i as usize], &segment.repeat(64));
        nic.harness.poke(UMEM + RECORDS + 0x40 + 0x80 * i, &64u32.to_be_bytes());
        number
    });
    let [first, second] = queues;
    let mut large = rqt(&[first]);
    create_rqt::MAX_ENTRIES.set(&mut large, 4);
    let (table, table_number) = create(&nic, &large).unwrap();
    let mut hashed = tir(table_number);
    hashed[create_tir::KEY..][..40].fill(0x5a);
    let (interface, interface_number) = create(&nic, &hashed).unwrap();
    let matcher = nic.matcher(abi::TABLE_NIC_RX, 0, 0, &[0; 0x40]).unwrap();
    nic.flow(matcher, &[0; 0x40], &[(abi::FLOW_DEST_DEVX, AttributeValue::Handle(interface))]).unwrap();
    let mut arrived = 0;
    // Returns the user index of the queue in which a frame arrives, and whether it has a hash.
    let mut arrives = |nic: &mut Connectx| {
        nic.send(&frame());
        let entry = nic.harness.peek(UMEM + CQ_RING + 64 * arrived, 64);
        arrived += 1;
        assert_eq!(entry[63], 0x20, "no completion: {entry:02x?}");
        let is_hashed = entry[0x10] != 0;
        assert_eq!(entry[0xc..0x10] != [0; 4], is_hashed, "{entry:02x?}");
        (u32::from_be_bytes(entry[0x20..0x24].try_into().unwrap()) & 0xff_ffff, is_hashed)
    };
    assert_eq!(arrives(&mut nic), (7, true));
    // The interface follows its table.
    let to = |queues: &[u64]| changing(rqt(queues), defs::MODIFY_RQT, table_number, modify_rqt::QUEUES);
    assert_eq!(change(&nic, table, to(&[second, second])), Ok(()));
    assert_eq!(arrives(&mut nic), (8, true));
    for wrong in [
        to(&[first; 8]),
        to(&[first; 3]),
        to(&[first, 0xffff]),
        to(&[]),
        to(&[first])[..create_rqt::LIST].to_vec(),
        changing(rqt(&[first]), defs::MODIFY_RQT, table_number, 2),
        changing(rqt(&[first]), defs::MODIFY_RQT, table_number + 100, modify_rqt::QUEUES),
        changing(rqt(&[first]), defs::MODIFY_TIR, table_number, modify_rqt::QUEUES),
    ] {
        assert_eq!(change(&nic, table, wrong), Err(Errno::INVAL));
    }
    assert_eq!(arrives(&mut nic), (8, true), "a refused command has changed the table");
    // Another table.
    let (other, other_number) = create(&nic, &rqt(&[first])).unwrap();
    assert_eq!(destroy(&nic, table), Err(Errno::INVAL));
    let with = |table, mask| changing(tir(table), defs::MODIFY_TIR, interface_number, mask);
    assert_eq!(change(&nic, interface, with(77, modify_tir::TABLE)), Err(Errno::INVAL));
    assert_eq!(change(&nic, interface, with(other_number, 1)), Err(Errno::INVAL));
    assert_eq!(change(&nic, interface, with(other_number, modify_tir::TABLE)), Ok(()));
    assert_eq!(arrives(&mut nic), (7, true));
    assert_eq!(destroy(&nic, other), Err(Errno::INVAL));
    assert_eq!(destroy(&nic, table), Ok(()));
    // Without hashed fields, and with a function that the device does not have.
    let mut plain = with(0, modify_tir::HASH);
    create_tir::OUTER.set(&mut plain, 0);
    assert_eq!(change(&nic, interface, plain), Ok(()));
    assert_eq!(arrives(&mut nic), (7, false));
    let mut wrong = with(0, modify_tir::HASH);
    create_tir::HASH_FUNCTION.set(&mut wrong, 1);
    assert_eq!(change(&nic, interface, wrong), Err(Errno::INVAL));
    assert_eq!(arrives(&mut nic), (7, false));
    // An interface of one queue has neither.
    let direct = command(defs::CREATE_TIR, create_tir::BYTES, &[(create_tir::DISPATCH, 0), (create_tir::RQ, first)]);
    let (direct, number) = create(&nic, &direct).unwrap();
    for mask in [modify_tir::TABLE, modify_tir::HASH] {
        let wrong = changing(tir(other_number), defs::MODIFY_TIR, number, mask);
        assert_eq!(change(&nic, direct, wrong), Err(Errno::INVAL));
    }
}

#[test]
fn commands_with_foreign_or_missing_objects_are_refused() {
    let nic = Connectx::new("steering = { devx = true }");
    let umem = register(&nic);
    let (_, cq_number) = create(&nic, &cq(umem)).unwrap();
    let (interface, tis) = create(&nic, &command(defs::CREATE_TIS, 192, &[])).unwrap();
    assert_eq!(create(&nic, &cq(umem + 1)), Err(Errno::INVAL));
    assert_eq!(create(&nic, &rq(umem, cq_number + 1)), Err(Errno::INVAL));
    assert_eq!(create(&nic, &sq(umem, cq_number, tis + 1)), Err(Errno::INVAL));
    assert_eq!(create(&nic, &rqt(&[77])), Err(Errno::INVAL));
    assert_eq!(create(&nic, &rqt(&[])), Err(Errno::INVAL));
    assert_eq!(create(&nic, &tir(77)), Err(Errno::INVAL));
    for (field, value) in [
        (create_wq::PD, 2),
        (create_wq::RING_OFFSET, UMEM_BYTES),
        (create_wq::RING_OFFSET, RQ_RING + 0x20),
        (create_wq::RING_OFFSET, u64::MAX),
        (create_wq::RECORD_OFFSET, UMEM_BYTES - 7),
        (create_wq::LOG_ENTRIES, 31),
        (create_wq::LOG_STRIDE, 15),
        (create_rq::MEMORY_TYPE, 1),
        (create_rq::STATE, 1),
    ] {
        let mut command = rq(umem, cq_number);
        field.set(&mut command, u128::from(value));
        assert_eq!(create(&nic, &command), Err(Errno::INVAL), "{field:?} {value:#x}");
    }
    let (send, number) = create(&nic, &sq(umem, cq_number, tis)).unwrap();
    assert_eq!(modify(&nic, send, defs::MODIFY_SQ, number + 1, defs::QUEUE_RDY), Err(Errno::INVAL));
    assert_eq!(modify(&nic, send, defs::MODIFY_RQ, number, defs::QUEUE_RDY), Err(Errno::INVAL));
    assert_eq!(modify(&nic, send, defs::MODIFY_SQ, number, 9), Err(Errno::INVAL));
    assert_eq!(modify(&nic, send, defs::MODIFY_SQ, number, defs::QUEUE_RDY), Ok(()));
    assert_eq!(modify(&nic, interface, defs::MODIFY_SQ, tis, defs::QUEUE_RDY), Err(Errno::INVAL));
    // Every prefix of a command, and commands of ones.
    for whole in [cq(umem), rq(umem, cq_number), sq(umem, cq_number, tis), rqt(&[1, 2]), tir(1)] {
        for length in 0..whole.len() {
            assert!(create(&nic, &whole[..length]).is_err(), "{length} bytes");
        }
        let ones = [&whole[..8], &vec![0xff; whole.len() - 8]].concat();
        assert!(create(&nic, &ones).is_err());
    }
    // Without a context for firmware commands there is nothing.
    let plain = Connectx::new("");
    assert_eq!(create(&plain, &command(defs::CREATE_TIS, 192, &[])), Err(Errno::INVAL));
}
