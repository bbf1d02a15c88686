use flextensord_proto::{
    kind::Kind,
    limit::PUT_BYTES,
    v1::{PutData, put_request::Part},
};

use crate::{
    ClientError, LoadOptions, LoadStep, blocking,
    tests::stand_in::StandIn,
    upload::{Source, UploadTensor},
};

fn connect() -> (StandIn, blocking::Client) {
    let stand_in = StandIn::start(&[]);
    let client = blocking::Client::connect(stand_in.options()).unwrap();
    (stand_in, client)
}

#[test]
fn a_load_hands_the_files_over_and_reports_its_progress() {
    let (stand_in, client) = connect();
    let directory = tempfile::tempdir().unwrap();
    for shard in 0..70 {
        let name = format!("m-{shard:03}.safetensors");
        std::fs::write(directory.path().join(name), "x").unwrap();
    }
    let map: Vec<_> = (0..70)
        .map(|shard| format!("\"t{shard}\":\"m-{shard:03}.safetensors\""))
        .collect();
    let index = format!("{{\"weight_map\":{{{}}}}}", map.join(","));
    std::fs::write(directory.path().join("m.safetensors.index.json"), index).unwrap();
    let mut steps = Vec::new();
    let options = LoadOptions {
        share: true,
        ..LoadOptions::default()
    };
    let loaded = client
        .load(directory.path(), "w", &options, |step| steps.push(step))
        .unwrap();
    assert_eq!((loaded.set.name.as_str(), loaded.set.tensors), ("w", 71));
    assert!(loaded.set.shared);
    let last = LoadStep {
        bytes_done: 20,
        bytes_total: 20,
    };
    assert_eq!(steps.last(), Some(&last));
    let offered = &stand_in.stage.state().offered;
    assert_eq!(
        (offered.len(), offered[0].as_str()),
        (71, "m.safetensors.index.json")
    );
}

#[test]
fn an_upload_goes_in_pieces_with_every_byte_once() {
    let (stand_in, client) = connect();
    let bytes: Vec<u8> = (0..PUT_BYTES * 2 + 5)
        .map(|n| u8::try_from(n % 251).unwrap())
        .collect();
    let tensor = |name: &str, source| UploadTensor {
        name: name.to_owned(),
        dtype: "U8".to_owned(),
        shape: vec![1],
        stride: Vec::new(),
        source,
    };
    let alias = Source::Alias {
        of: "a".to_owned(),
        offset: 5,
    };
    let tensors = [
        tensor("a", Source::Bytes(&bytes)),
        tensor("b", alias),
        tensor("c", Source::Bytes(&[])),
    ];
    client.put("w", &tensors, &LoadOptions::default()).unwrap();
    let mut sent: Vec<u8> = Vec::new();
    for message in &stand_in.stage.state().put {
        if let Some(Part::Data(PutData {
            tensor,
            offset,
            bytes,
        })) = &message.part
        {
            assert_eq!((tensor.as_str(), *offset), ("a", sent.len() as u64));
            assert!(bytes.len() <= PUT_BYTES);
            sent.extend(bytes);
        }
    }
    assert!(sent == bytes);
    // a daemon that refuses early does not wait for the bytes, and neither do we
    let error = client
        .put("refused", &tensors, &LoadOptions::default())
        .unwrap_err();
    assert_eq!(error.kind(), Some(Kind::HostMemory), "{error}");
}

#[test]
fn pages_are_followed_to_their_end_and_no_further() {
    let (_stand_in, client) = connect();
    let detail = client.weight_set("w").unwrap();
    assert_eq!((detail.tensors.len(), detail.set.name.as_str()), (5, "w"));
    let error = client.weight_sets().unwrap_err();
    assert!(matches!(error, ClientError::Protocol { .. }), "{error}");
    let error = client.drop_weight_set("w").unwrap_err();
    assert_eq!(error.remedy(), Some("close manager m"));
}
