from tinsmith.cli.main import main

main()
